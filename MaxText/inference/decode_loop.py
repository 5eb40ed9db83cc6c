"""The compiled programs of decoding: chunked prefill, many steps per dispatch, and plain logits.

A program is compiled once for each batch, bucket and cache capacity, never for a setting or the length
of an answer. Parameters are arguments of every program; the state is donated, so that each program
updates the caches in place. Rows that are padding, or have stopped, pass segment id 0: they change nothing.

Dims: B rows, C chunk, N steps of one dispatch, T tokens, D model width, V vocabulary, G stop ids.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from MaxText.inference.sampling import Sampling, sample

SMALLEST_BUCKET = 16
STOP_BUCKET = 8
CAPACITY_BUCKET = 64
NO_TOKEN = -1  # a step at which a row had already stopped, and the unused places of a stop list


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """Everything that decoding carries from one program to the next.

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


def start(decoder: nnx.Module, remaining: Int[Array, "B"], *, capacity: int) -> DecodeState:
  """Returns the state before the first prompt token.

  Args:
    decoder: the model.
    remaining: [B] int32, tokens that each row may pick after its first; a row of padding has any value.
    capacity: S, tokens that a full-attention cache holds.
  """
  B = remaining.shape[0]
  zeros = jnp.zeros(B, jnp.int32)
  return DecodeState(
    cache=decoder.init_cache(B, capacity),
    token=zeros,
    position=zeros,
    remaining=remaining,
    active=jnp.zeros(B, bool),
    finite=jnp.ones(B, bool),
  )


def prefill(
  decoder: nnx.Module,
  state: DecodeState,
  ids: Int[Array, "B C"],
  segment_ids: Int[Array, "B C"],
  sampling: Sampling,
  stop_ids: Int[Array, "G"],
) -> DecodeState:
  """Reads one chunk of every prompt and picks the token after each row's last valid one.

  A row whose prompt goes on in a later chunk has its pick replaced there; a row without a valid token
  here keeps the pick that it has.

  Args:
    decoder: the model.
    state: the state before the chunk.
    ids: [B, C] token ids.
    segment_ids: [B, C] 1 for a token, 0 for padding on the right.
    sampling: settings of the B rows.
    stop_ids: [G] ids that end a row, -1 where unused.
  """
  hidden, cache = decoder.hidden(ids, state.cache, segment_ids)
  count = jnp.sum(segment_ids != 0, axis=1)
  # the head reads one position a row: logits of a whole prompt would be its largest array by far
  last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
  return _pick(decoder, dataclasses.replace(state, cache=cache), last, count, sampling, stop_ids)


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
    state = dataclasses.replace(state, cache=cache, remaining=state.remaining - active)
    state = _pick(decoder, state, hidden, active, sampling, stop_ids)
    picked = picked.at[:, index].set(jnp.where(active == 1, state.token, NO_TOKEN))
    return index + 1, picked, state

  picked = jnp.full((state.token.shape[0], steps), NO_TOKEN, jnp.int32)
  _, picked, state = jax.lax.while_loop(unfinished, step, (jnp.int32(0), picked, state))
  return picked, state


def _pick(
  decoder: nnx.Module,
  state: DecodeState,
  hidden: Float[Array, "B 1 D"],
  count: Int[Array, "B"],
  sampling: Sampling,
  stop_ids: Int[Array, "G"],
) -> DecodeState:
  """Picks a token in the rows that read `count` > 0 tokens, and says which of them go on."""
  logits = decoder.logits(hidden)[:, 0].astype(jnp.float32)
  has_read = count > 0
  position = state.position + count
  token = jnp.where(has_read, sample(logits, position, sampling), state.token)
  finite = state.finite & (jnp.all(jnp.isfinite(logits), axis=-1) | ~has_read)
  goes_on = finite & (state.remaining > 0) & ~jnp.isin(token, stop_ids)
  active = jnp.where(has_read, goes_on, state.active)
  return dataclasses.replace(state, token=token, position=position, active=active, finite=finite)


class Program:
  """A function of (parameters, arrays...), compiled ahead of its first run for each set of shapes.

  Compiling by hand keeps the compile time out of every other figure and makes the number of programs
  visible: nothing can recompile unseen.

  Attributes:
    compile_seconds: time spent on tracing and compiling so far.
  """

  def __init__(self, function: Callable, *, donates: bool = False):
    """Wraps `function`; with `donates`, its first argument after the parameters is consumed by a call."""
    self._function = function
    self._donates = donates
    self._compiled: dict[tuple, jax.stages.Compiled] = {}
    self.compile_seconds = 0.0

  @property
  def count(self) -> int:
    """Programs compiled so far."""
    return len(self._compiled)

  def __call__(self, params: Any, *arrays: Any, **static: int) -> Any:
    """Runs the program of these shapes and static values, which the first such call compiles."""
    leaves, tree = jax.tree.flatten(arrays)
    donated = len(jax.tree.leaves(arrays[0])) if self._donates else 0
    arguments = params, leaves[:donated], leaves[donated:]
    key = (tree, *(leaf.shape for leaf in leaves), *static.items())
    if key not in self._compiled:
      started = time.perf_counter()

      def flat(params, donated, kept):
        return self._function(params, *jax.tree.unflatten(tree, donated + kept), **static)

      self._compiled[key] = jax.jit(flat, donate_argnums=1).lower(*arguments).compile()
      self.compile_seconds += time.perf_counter() - started
    return self._compiled[key](*arguments)


class DecodeLoop:
  """A decoder's parameters and its compiled programs.

  Attributes:
    prefill_chunk: most prompt tokens that one program reads.
    steps: most tokens a row that one dispatch picks.
  """

  def __init__(self, decoder: nnx.Module, *, prefill_chunk: int = 512, steps: int = 32):
    graph, self._params = nnx.split(decoder)

    def program(method: Callable, donates: bool = False) -> Program:
      return Program(
        lambda params, *rest, **kw: method(nnx.merge(graph, params), *rest, **kw), donates=donates
      )

    self._start = program(start)
    self._prefill = program(prefill, donates=True)
    self._decode = program(decode_steps, donates=True)
    self._logits = program(lambda decoder, ids, segment_ids: decoder(ids, None, segment_ids)[0])
    self.prefill_chunk = prefill_chunk
    self.steps = steps

  @property
  def compile_seconds(self) -> float:
    """Seconds spent on compiling so far."""
    return sum(p.compile_seconds for p in self._programs)

  @property
  def program_count(self) -> int:
    """Programs compiled so far."""
    return sum(p.count for p in self._programs)

  @property
  def _programs(self) -> tuple[Program, ...]:
    return self._start, self._prefill, self._decode, self._logits

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
    longest = max(len(prompt) for prompt in prompts)
    remaining = np.array(max_new_tokens, np.int32) - 1
    state = self._start(self._params, remaining, capacity=capacity)
    stop = stop_array(stop_ids)
    for offset, width in chunks(longest, self.prefill_chunk):
      ids, segment_ids = padded([prompt[offset : offset + width] for prompt in prompts], width)
      state = self._prefill(self._params, state, ids, segment_ids, sampling, stop)
    return state

  def decode(
    self, state: DecodeState, sampling: Sampling, stop_ids: Sequence[int], limit: int
  ) -> tuple[np.ndarray, DecodeState]:
    """Runs up to `limit` steps in one dispatch; `state` is consumed.

    Returns:
      [B, N] int32 picked ids, -1 where a row had stopped, and the next state.
    """
    steps = np.int32(min(limit, self.steps))
    picked, state = self._decode(self._params, state, sampling, stop_array(stop_ids), steps, steps=self.steps)
    return np.asarray(picked), state

  def logits(self, ids: Sequence[int]) -> np.ndarray:
    """Returns the [T, V] float32 logits after each of T tokens, read in one shot without a cache."""
    tokens, segment_ids = padded([ids], bucket(len(ids), largest=1 << 62))
    return np.asarray(self._logits(self._params, tokens, segment_ids)[0, : len(ids)])


def bucket(length: int, largest: int) -> int:
  """Returns the padded length of a chunk: the next power of two, at least 16, at most `largest`."""
  return min(largest, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def chunks(length: int, largest: int) -> Iterator[tuple[int, int]]:
  """Yields (offset, padded width) of the chunks that cover `length` tokens."""
  for offset in range(0, length, largest):
    yield offset, bucket(min(length - offset, largest), largest)


def cache_capacity(prompt_length: int, max_new_tokens: int, prefill_chunk: int) -> int:
  """Returns the cache slots for a prompt in its buckets and the answer, a multiple of 64."""
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
