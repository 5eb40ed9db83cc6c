"""Answers many requests side by side: slots, pages, and the programs that run on them.

The engine does what it is told and decides nothing: who comes in, who waits and who has to leave is the
scheduler's. One request after the other is read: `insert`, `prefill_chunk` to the end of the prompt, `begin`.
All of them go on together: `decode`.

Dims: S slots, N pages of a slot, M steps of one dispatch, K alternatives.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from MaxText.common.errors import InputError
from MaxText.inference import engine_programs as programs
from MaxText.inference.decode_loop import bucket, padded
from MaxText.inference.engine_programs import NO_TOKEN, EngineState, Picked, SlotSettings
from MaxText.inference.program import Programs
from MaxText.inference.prompts import Settings
from MaxText.inference.resources import Resources, ranks_of
from MaxText.inference.sampling import rows


@dataclasses.dataclass(frozen=True)
class Exported:
  """A request outside the engine, with everything that it needs to go on.

  Attributes:
    state: the state of its slot, with its pages in order.
    length: tokens in its memory.
  """

  state: EngineState
  length: int


class Engine:
  """The slots of one decoder.

  Attributes:
    ranks: parts of a mesh that share neither slots nor pages; 1 on one device.
    resources: which slots and pages are free.
    prefill_chunk_size: most prompt tokens that one program reads.
    steps: most tokens a slot that one dispatch picks.
    max_target_length: most tokens of a request, prompt and answer together.
  """

  def __init__(
    self,
    decoder: nnx.Module,
    *,
    slots: int,
    pages: int,
    page_size: int = 64,
    max_target_length: int,
    prefill_chunk: int = 512,
    steps: int = 8,
    stop_ids: int = 16,
  ):
    """Allocates the state; compiles nothing else yet.

    Args:
      decoder: with its weights; on a mesh, the state is laid out beside them.
      slots: S, requests at a time.
      pages: of the pools of all ranks together; the slots of a rank share its own.
      page_size: tokens of a page.
      max_target_length: most tokens of a request, prompt and answer together.
      prefill_chunk: most prompt tokens that one program reads.
      steps: most tokens a slot that one dispatch picks.
      stop_ids: most stop ids of a request.

    Raises:
      InputError: slots or pages do not divide over the ranks of the mesh; nothing is allocated yet.
    """
    self._pages_per_slot = -(-max_target_length // page_size)
    self.prefill_chunk_size, self.steps = prefill_chunk, steps
    self._stop_ids = stop_ids
    self._programs = made = Programs(decoder)
    self.ranks = 1 if made.layout is None else ranks_of(made.layout, slots, pages)
    replaces = functools.partial(made.program, donates=True, settled=programs.settle)
    self._insert = replaces(programs.insert)
    self._prefill = replaces(programs.prefill_chunk)
    self._begin = replaces(programs.begin)
    self._decode = replaces(programs.decode)
    self._reset = replaces(programs.reset_slot)
    self._export = made.program(programs.export_slot)
    self._import = replaces(programs.import_slot)
    self._empty = made.program(programs.empty, settled=programs.settle)
    self._shape = {"slots": slots, "pages": pages, "page_size": page_size, "stop_ids": stop_ids}
    self.restart()
    self.max_target_length = min(max_target_length, self.resources.longest)

  def restart(self) -> None:
    """Frees and wipes everything, whatever has become of the state."""
    S, pages, page_size = (self._shape[key] for key in ("slots", "pages", "page_size"))
    self.resources = Resources(
      slots=S, pages=pages, page_size=page_size, pages_per_slot=self._pages_per_slot, ranks=self.ranks
    )
    self._length, self._active = np.zeros(S, int), np.zeros(S, bool)
    self._state = self._programs.run(self._empty, **self._shape, ranks=self.ranks)

  @property
  def is_intact(self) -> bool:
    """Whether the state is there; a program that fails halfway has consumed it."""
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))

  @property
  def program_count(self) -> int:
    """Programs compiled so far."""
    return self._programs.count

  @property
  def compile_seconds(self) -> float:
    """Time spent on tracing and compiling so far."""
    return self._programs.compile_seconds

  @property
  def implementations(self) -> dict[str, str]:
    """Operation -> implementation that the programs so far use."""
    used = self._programs.implementations
    return {op: "+".join(sorted(names)) for op, names in sorted(used.items())}

  def wait(self) -> None:
    """Returns when everything that was asked for is done: programs run behind the host's back."""
    jax.block_until_ready(self._state)

  @property
  def active(self) -> np.ndarray:
    """[S] bool, the slots that `decode` goes on with."""
    return self._active.copy()

  def length(self, slot: int) -> int:
    """Returns the tokens in the memory of a slot."""
    return int(self._length[slot])

  def insert(self, prompt_length: int, settings: Settings, stop_ids: Sequence[int]) -> int | None:
    """Gives a request a slot and the pages of its prompt, or returns None where either is lacking.

    Args:
      prompt_length: tokens of the prompt.
      settings: how to answer, already checked.
      stop_ids: ids that end the answer.

    Raises:
      InputError: the request could never be held, or has too many stop ids.
    """
    self.check(prompt_length, stop_ids)
    limit = min(settings.max_new_tokens, self.max_target_length - prompt_length)
    values = _settings(settings, stop_ids, self._stop_ids)  # before the slot is taken: it may be refused
    slot = self.resources.acquire(prompt_length + 1)
    if slot is None:
      return None
    self._run(self._insert, np.int32(slot), np.int32(limit), values)
    self._length[slot] = 0
    return slot

  def check(self, prompt_length: int, stop_ids: Sequence[int]) -> None:
    """Refuses what `insert` could never hold; any thread may ask.

    Raises:
      InputError: with the number that is too large and the limit.
    """
    most = self.max_target_length
    if prompt_length >= most:
      raise InputError(
        f"prompt: {prompt_length} tokens, but a request holds {most} with at least one new token"
      )
    if len(stop_ids) > self._stop_ids:
      raise InputError(f"stop_ids: got {len(stop_ids)}, expected at most {self._stop_ids}")

  def prefill_chunk(self, slot: int, ids: Sequence[int]) -> None:
    """Reads the next tokens of a slot's prompt, at most `prefill_chunk_size` of them."""
    pieces = padded([ids], bucket(len(ids), self.prefill_chunk_size))
    self._run(self._prefill, np.int32(slot), self.resources.table[slot].copy(), *pieces)
    self._length[slot] += len(ids)

  def read(self, slot: int, ids: Sequence[int]) -> Picked:
    """Reads a whole prompt, chunk by chunk, and picks the first token, as `begin` does."""
    for start in range(0, len(ids), self.prefill_chunk_size):
      self.prefill_chunk(slot, ids[start : start + self.prefill_chunk_size])
    return self.begin(slot)

  def begin(self, slot: int) -> Picked:
    """Picks the first token of a slot whose prompt was read; `decode` goes on with it."""
    return self._picked(self._begin, np.int32(slot))

  def grow(self, slot: int, steps: int) -> bool:
    """Gives a slot the pages for `steps` more tokens, or returns False where they are not free."""
    # an answer ends at the longest request's last token, however many steps are asked for
    return self.resources.grow(slot, min(int(self._length[slot]) + steps, self.max_target_length))

  def decode(self, limit: int | None = None, only: Sequence[int] | None = None) -> Picked:
    """Runs some steps of the active slots, whose pages have to reach that far.

    Args:
      limit: most steps; `steps` when None.
      only: the slots that go on, all of them when None.

    Raises:
      RuntimeError: a slot was not given the pages that these steps need.
    """
    limit = min(limit or self.steps, self.steps)
    chosen = np.full(len(self._active), only is None)
    chosen[list(only or ())] = True
    for slot in np.flatnonzero(self._active & chosen):
      if not self.grow(int(slot), limit):
        raise RuntimeError(
          f"slot {slot} has no pages for {limit} more tokens; grow it, or take it out, first"
        )
    table = self.resources.table.copy()
    picked = self._picked(self._decode, table, np.int32(limit), chosen, steps=self.steps)
    self._length += np.sum(picked.token != NO_TOKEN, axis=1)
    return picked

  def finite(self) -> np.ndarray:
    """Returns [S] bool: whether every logit that the slot picked from was finite."""
    return np.asarray(self._state.finite)

  def reset_slot(self, slot: int) -> None:
    """Ends the request of a slot, wipes its memory, and frees its pages."""
    self._run(self._reset, np.int32(slot), self.resources.table[slot].copy())
    self.resources.release(slot)
    self._length[slot], self._active[slot] = 0, False

  def export_slot(self, slot: int) -> Exported:
    """Takes a copy of everything that a slot's request needs; the slot itself stays as it is.

    The copy is on the host, so that a request that waits costs the device nothing.
    """
    pages = self.resources.table[slot].copy()
    state = self._programs.run(self._export, self._state, np.int32(slot), pages)
    return Exported(jax.device_get(state), int(self._length[slot]))

  def import_slot(self, moved: Exported) -> int | None:
    """Goes on with an exported request in any slot, or returns None where there is no room for it."""
    slot = self.resources.acquire(moved.length + 1)
    if slot is None:
      return None
    self._run(self._import, np.int32(slot), self.resources.table[slot].copy(), moved.state)
    self._length[slot], self._active[slot] = moved.length, bool(moved.state.active[0])
    return slot

  def warm_up(self) -> None:
    """Compiles and runs every program once, so that no request waits for one; needs an idle engine."""
    slot = self.insert(1, Settings(max_new_tokens=self.steps + 1), ())
    pages = self.resources.table[slot].copy()
    widths = {bucket(length, self.prefill_chunk_size) for length in range(1, self.prefill_chunk_size + 1)}
    for width in sorted(widths):
      self._run(self._prefill, np.int32(slot), pages, *padded([[0]], width))
    self.begin(slot)
    moved = self.export_slot(slot)
    self.reset_slot(slot)
    slot = self.import_slot(moved)
    self.decode()
    self.reset_slot(slot)

  def _run(self, program, *arrays) -> None:
    self._state = self._programs.run(program, self._state, *arrays)

  def _picked(self, program, *arrays, **static) -> Picked:
    picked, self._state = self._programs.run(program, self._state, *arrays, **static)
    self._active = np.array(self._state.active)
    return jax.tree.map(np.asarray, picked)


def _settings(settings: Settings, stop_ids: Sequence[int], width: int) -> SlotSettings:
  """The settings of one slot, as what `insert` takes."""
  one = rows(1, settings.temperature, settings.top_k, settings.top_p, settings.seed, settings.min_p)
  return SlotSettings(
    sampling=jax.tree.map(lambda x: x[0], one),
    presence_penalty=np.float32(settings.presence_penalty),
    frequency_penalty=np.float32(settings.frequency_penalty),
    alternatives=np.int32(settings.logprobs),
    stop_ids=np.array([*stop_ids, *[NO_TOKEN] * (width - len(stop_ids))], np.int32),
  )
