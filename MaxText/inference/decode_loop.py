"""The compiled programs of decoding: chunked prefill, many steps per dispatch, and plain logits.

A program is compiled once for each batch, bucket and cache capacity, never for a setting or the length
of an answer. Parameters are arguments of every program; the state is donated, so that each program
updates the caches in place. Rows that are padding, or have stopped, pass segment id 0: they change nothing.

Dims: B rows, C chunk, N steps of one dispatch, T tokens, D model width, V vocabulary, G stop ids.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from MaxText.common import choices
from MaxText.inference.program import Programs
from MaxText.inference.sampling import Sampling, sample

SMALLEST_BUCKET = 16
STOP_BUCKET = 8
CAPACITY_BUCKET = 256
NO_TOKEN = -1  # a step at which a row had already stopped, and the unused places of a stop list


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """What has been read of the prompts of a batch.

  Attributes:
    cache: the decoder's caches.
    hidden: [B, D] normalised hidden state of each row's last token.
    length: [B] int32, tokens read of each row; 0 in a row of padding.
  """

  cache: Any
  hidden: Float[Array, "B D"]
  length: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """What decoding carries from one program to the next.

  Attributes:
    cache: the decoder's caches; they hold the tokens before `token`.
    token: [B] int32, the last picked token, not yet in the cache.
    position: [B] int32, index of `token` in its sequence, so also the number of tokens in the cache.
    remaining: [B] int32, tokens that the row may still pick after `token`.
    active: [B] bool, the row goes on.
    finite: [B] bool, every logit that a token was picked from was finite.
  """

  cache: Any
  token: Int[Array, "B"]
  position: Int[Array, "B"]
  remaining: Int[Array, "B"]
  active: Bool[Array, "B"]
  finite: Bool[Array, "B"]


def start(decoder: nnx.Module, *, batch: int, capacity: int) -> Prefix:
  """Returns the state before the first prompt token, for `batch` rows of `capacity` cache slots."""
  return Prefix(
    cache=decoder.init_cache(batch, capacity),
    hidden=jnp.zeros((batch, decoder.cfg.base_emb_dim), decoder.cfg.dtype),
    length=jnp.zeros(batch, jnp.int32),
  )


def prefill(
  decoder: nnx.Module, prefix: Prefix, ids: Int[Array, "B C"], segment_ids: Int[Array, "B C"]
) -> Prefix:
  """Reads one chunk of every prompt; a row that has ended passes padding and keeps what it has.

  Args:
    decoder: the model.
    prefix: the state before the chunk.
    ids: [B, C] token ids.
    segment_ids: [B, C] 1 for a token, 0 for padding on the right.
  """
  hidden, cache = decoder.hidden(ids, prefix.cache, segment_ids)
  count = jnp.sum(segment_ids != 0, axis=1)
  # one position a row goes on to the head: logits of a whole prompt would be its largest array by far
  last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
  hidden = jnp.where((count > 0)[:, None], last, prefix.hidden)
  return Prefix(cache, hidden, prefix.length + count)


def begin(
  decoder: nnx.Module,
  cache: Any,
  hidden: Float[Array, "B D"],
  length: Int[Array, "B"],
  remaining: Int[Array, "B"],
  sampling: Sampling,
  stop_ids: Int[Array, "G"],
) -> DecodeState:
  """Picks the first token of every row; a row of padding never becomes active.

  Args:
    decoder: the model.
    cache: the caches after the last chunk.
    hidden: [B, D] hidden state of each row's last token.
    length: [B] int32, tokens of each row; 0 in a row of padding.
    remaining: [B] int32, tokens that each row may pick after its first.
    sampling: settings of the B rows.
    stop_ids: [G] ids that end a row, -1 where unused.
  """
  is_token = length > 0
  state = DecodeState(cache, jnp.zeros_like(length), length, remaining, is_token, jnp.ones_like(is_token))
  return _pick(decoder, state, hidden, sampling, stop_ids)


def decode_steps(
  decoder: nnx.Module,
  state: DecodeState,
  sampling: Sampling,
  stop_ids: Int[Array, "G"],
  limit: Int[Array, ""],
  *,
  steps: int,
) -> tuple[Int[Array, "B N"], DecodeState]:
  """Runs up to `limit` steps of one token a row, fewer when every row has stopped.

  Args:
    decoder: the model.
    state: the state after prefill or earlier steps.
    sampling: settings of the B rows.
    stop_ids: [G] ids that end a row, -1 where unused.
    limit: steps to run, at most `steps`; traced, so that a short dispatch compiles nothing.
    steps: N, the width of the result.

  Returns:
    [B, N] int32 picked ids, -1 where a row had stopped, and the next state.
  """

  def unfinished(carry):
    index, _, state = carry
    return (index < limit) & jnp.any(state.active)

  def step(carry):
    index, picked, state = carry
    active = state.active.astype(jnp.int32)
    hidden, cache = decoder.hidden(state.token[:, None], state.cache, active[:, None])
    after = dataclasses.replace(
      state, cache=cache, position=state.position + active, remaining=state.remaining - active
    )
    after = _pick(decoder, after, hidden[:, 0], sampling, stop_ids)
    picked = picked.at[:, index].set(jnp.where(state.active, after.token, NO_TOKEN))
    return index + 1, picked, after

  picked = jnp.full((state.token.shape[0], steps), NO_TOKEN, jnp.int32)
  _, picked, state = jax.lax.while_loop(unfinished, step, (jnp.int32(0), picked, state))
  return picked, state


def _pick(
  decoder: nnx.Module,
  state: DecodeState,
  hidden: Float[Array, "B D"],
  sampling: Sampling,
  stop_ids: Int[Array, "G"],
) -> DecodeState:
  """Picks a token in the active rows, and says which of them go on."""
  logits = decoder.logits(hidden).astype(jnp.float32)
  token = jnp.where(state.active, sample(logits, state.position, sampling), state.token)
  finite = state.finite & (jnp.all(jnp.isfinite(logits), axis=-1) | ~state.active)
  active = state.active & finite & (state.remaining > 0) & ~jnp.isin(token, stop_ids)
  return dataclasses.replace(state, token=token, active=active, finite=finite)


class DecodeLoop:
  """A decoder's parameters and its compiled programs.

  Attributes:
    prefill_chunk: most prompt tokens that one program reads.
    steps: most tokens a row that one dispatch picks.
    row_multiple: rows that every batch has to be a multiple of.
  """

  def __init__(self, decoder: nnx.Module, *, prefill_chunk: int = 512, steps: int = 32):
    self._programs = programs = Programs(decoder)
    self._start = programs.program(start)
    self._prefill = programs.program(prefill, donates=True)
    self._begin = programs.program(begin, donates=True)
    self._decode = programs.program(decode_steps, donates=True)
    self._logits = programs.program(lambda decoder, ids, segment_ids: decoder(ids, None, segment_ids)[0])
    self.prefill_chunk = prefill_chunk
    self.steps = steps
    self.row_multiple = 1 if programs.layout is None else programs.layout.row_multiple

  @property
  def compile_seconds(self) -> float:
    """Time spent on tracing and compiling so far."""
    return self._programs.compile_seconds

  @property
  def implementations(self) -> choices.Choices:
    """Operation -> implementations that the programs so far were traced with."""
    return self._programs.implementations

  @property
  def program_count(self) -> int:
    """Programs compiled so far."""
    return self._programs.count

  def prefill(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    sampling: Sampling,
    stop_ids: Sequence[int],
    *,
    capacity: int,
  ) -> DecodeState:
    """Reads a batch of prompts of any lengths and picks the first token of each.

    Args:
      prompts: token ids, one sequence a row; an empty one is a row of padding, which never becomes active.
      max_new_tokens: tokens to pick, one number a row.
      sampling: settings of the rows.
      stop_ids: ids that end a row.
      capacity: S, cache slots of each row: at least prompt and new tokens together.
    """
    programs, params = self._programs, self._programs.params
    prefix = programs.run(self._start, batch=len(prompts), capacity=capacity)
    first = np.array(max_new_tokens, np.int32) - 1, sampling, stop_array(stop_ids)
    longest = max(len(prompt) for prompt in prompts)
    pieces = [
      padded([prompt[offset : offset + width] for prompt in prompts], width)
      for offset, width in chunks(longest, self.prefill_chunk)
    ]
    # at most two shapes: the whole chunks, and what is left
    shapes = {ids.shape: (ids, segment_ids) for ids, segment_ids in pieces}.values()
    programs.compile(
      *(self._prefill.job(params, prefix, *piece) for piece in shapes),
      self._begin.job(params, prefix.cache, prefix.hidden, prefix.length, *first),
    )
    for piece in pieces:
      prefix = self._prefill(params, prefix, *piece)
    return self._begin(params, prefix.cache, prefix.hidden, prefix.length, *first)

  def decode(
    self, state: DecodeState, sampling: Sampling, stop_ids: Sequence[int], limit: int
  ) -> tuple[np.ndarray, DecodeState]:
    """Runs up to `limit` steps in one dispatch; `state` is consumed.

    Returns:
      [B, N] int32 picked ids, -1 where a row had stopped, and the next state.
    """
    arrays = state, sampling, stop_array(stop_ids), np.int32(min(limit, self.steps))
    picked, state = self._programs.run(self._decode, *arrays, steps=self.steps)
    return np.asarray(picked), state

  def logits(self, ids: Sequence[int]) -> np.ndarray:
    """Returns the [T, V] float32 logits after each of T tokens, read in one shot without a cache."""
    rows = [ids, *[()] * (self.row_multiple - 1)]
    arrays = padded(rows, bucket(len(ids), largest=1 << 62))
    return np.asarray(self._programs.run(self._logits, *arrays)[0, : len(ids)])


def bucket(length: int, largest: int) -> int:
  """Returns the padded length of a chunk: the next power of two, at least 16, at most `largest`."""
  return min(largest, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def chunks(length: int, largest: int) -> Iterator[tuple[int, int]]:
  """Yields (offset, padded width) of the chunks that cover `length` tokens."""
  for offset in range(0, length, largest):
    yield offset, bucket(min(length - offset, largest), largest)


def cache_capacity(prompt_length: int, max_new_tokens: int, prefill_chunk: int) -> int:
  """Returns the cache slots for a prompt in its buckets and the answer, a multiple of 256."""
  prompt = sum(width for _, width in chunks(prompt_length, prefill_chunk))
  return -(-(prompt + max_new_tokens) // CAPACITY_BUCKET) * CAPACITY_BUCKET


def padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns ids and segment ids, each [B, C] int32, with the padding on the right."""
  ids = np.zeros((len(rows), width), np.int32)
  segment_ids = np.zeros_like(ids)
  for row, tokens in enumerate(rows):
    ids[row, : len(tokens)] = tokens
    segment_ids[row, : len(tokens)] = 1
  return ids, segment_ids


def stop_array(stop_ids: Sequence[int]) -> np.ndarray:
  """Returns the stop ids as [G] int32, padded to a multiple of 8 so that their number compiles nothing."""
  size = -(-max(len(stop_ids), 1) // STOP_BUCKET) * STOP_BUCKET
  return np.array([*stop_ids, *[NO_TOKEN] * (size - len(stop_ids))], np.int32)
