"""The compiled programs of the engine: what happens to the slots, as functions of one state to the next.

The state is donated and replaced as a whole. A slot without a request passes segment id 0, so that not a bit
of it changes. What differs between requests (settings, stop ids, lengths) is an array with one entry a slot:
as requests come and go, nothing compiles.

On a mesh every rank holds the memory of its own slots (`settle`). All ranks run every program: while one of
them reads a prompt, the others run a row of padding that writes nothing.

Dims: S slots, N pages of a slot, C tokens of a chunk, D model width, V vocabulary, G stop ids, M steps of one
dispatch, K alternatives.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from MaxText.inference import hybrid_cache
from MaxText.inference.decode_loop import NO_TOKEN
from MaxText.inference.hybrid_cache import SlotRow
from MaxText.inference.prompts import MAX_LOGPROBS
from MaxText.inference.sampling import Sampling, sample
from MaxText.kernels.mla import PageMesh
from MaxText.layers.cache import LatentPool
from MaxText.models import sharding
from MaxText.models.sharding import Layout

ALTERNATIVES = MAX_LOGPROBS
Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSettings:
  """How each slot answers; one entry a slot.

  Attributes:
    sampling: temperature, filters and seed, [S] each.
    presence_penalty: [S] float32 taken off the logit of every token that was already picked.
    frequency_penalty: [S] float32 taken off for each time that it was picked.
    alternatives: [S] int32 log-probabilities wanted beside the picked one's, at most K.
    stop_ids: [S, G] int32 ids that end the answer, -1 where unused.
  """

  sampling: Sampling
  presence_penalty: Leaf
  frequency_penalty: Leaf
  alternatives: Leaf
  stop_ids: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
  """Everything that the engine keeps on the device beside the weights.

  Attributes:
    pools: recurrent rows of the slots, and the pages of latents.
    length: [S] int32, tokens in the memory of each slot.
    hidden: [S, D] hidden state of the last prompt token that was read.
    token: [S] int32, the last picked token, not yet in the memory.
    remaining: [S] int32, tokens that the slot may still pick after `token`.
    active: [S] bool, the slot goes on picking.
    finite: [S] bool, every logit that it picked from was finite.
    counts: [S, V] int32, how often each token was picked.
    settings: how each slot answers.
  """

  pools: Leaf
  length: Leaf
  hidden: Leaf
  token: Leaf
  remaining: Leaf
  active: Leaf
  finite: Leaf
  counts: Leaf
  settings: SlotSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Picked:
  """What one dispatch picked.

  Attributes:
    token: [S, M] int32, -1 where the slot picked nothing.
    logprob: [S, M] float32 log-probability of the token under the model's own distribution.
    top_ids: [S, M, K] int32 likeliest tokens, where a slot wants alternatives.
    top_logprobs: [S, M, K] float32 their log-probabilities.
  """

  token: Leaf
  logprob: Leaf
  top_ids: Leaf
  top_logprobs: Leaf


def settle(layout: Layout | None, out: Any) -> Any:
  """Fixes the layout of what a program leaves: memory by ranks, single numbers of a slot whole everywhere."""
  if layout is None:
    return out
  is_state = lambda node: isinstance(node, EngineState)
  fix = lambda node: _by_ranks(layout, node) if is_state(node) else sharding.settle(layout, node)
  return jax.tree.map(fix, out, is_leaf=is_state)


def _by_ranks(layout: Layout, state: EngineState) -> EngineState:
  numbers = sharding.settle(layout, dataclasses.replace(state, pools=None, hidden=None, counts=None))
  return dataclasses.replace(
    numbers,
    pools=sharding.constrain_cache(layout, state.pools),
    hidden=layout.constrain(state.hidden, "activation_batch", None),
    counts=layout.constrain(state.counts, "activation_batch", "vocab"),
  )


def empty(
  decoder: nnx.Module, *, slots: int, pages: int, page_size: int, stop_ids: int, ranks: int
) -> EngineState:
  """Returns the state without any request."""
  S, cfg = slots, decoder.cfg
  zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
  sampling = Sampling(zeros(S), jnp.zeros(S, jnp.int32), zeros(S) + 1, zeros(S), jnp.zeros(S, jnp.uint32))
  return EngineState(
    pools=hybrid_cache.empty_pools(cfg, decoder.plan, S, pages, page_size, ranks),
    length=jnp.zeros(S, jnp.int32),
    hidden=jnp.zeros((S, cfg.base_emb_dim), cfg.dtype),
    token=jnp.zeros(S, jnp.int32),
    remaining=jnp.zeros(S, jnp.int32),
    active=jnp.zeros(S, bool),
    finite=jnp.ones(S, bool),
    counts=jnp.zeros((S, cfg.vocab_size), jnp.int32),
    settings=SlotSettings(
      sampling, zeros(S), zeros(S), jnp.zeros(S, jnp.int32), jnp.full((S, stop_ids), NO_TOKEN, jnp.int32)
    ),
  )


def insert(
  decoder: nnx.Module,
  state: EngineState,
  slot: Int[Array, ""],
  remaining: Int[Array, ""],
  settings: SlotSettings,
) -> EngineState:
  """Gives a slot to a request whose prompt is still to be read; whatever the slot held is gone.

  Args:
    decoder: the model.
    state: the state before.
    slot: which slot.
    remaining: tokens that it may pick.
    settings: of this request, without the slot axis.
  """
  state = _cleared(state, _row(decoder, state, slot))
  return dataclasses.replace(
    state,
    remaining=state.remaining.at[slot].set(remaining),
    settings=jax.tree.map(lambda old, new: old.at[slot].set(new), state.settings, settings),
  )


def prefill_chunk(
  decoder: nnx.Module,
  state: EngineState,
  slot: Int[Array, ""],
  pages: Int[Array, "N"],
  ids: Int[Array, "1 C"],
  segment_ids: Int[Array, "1 C"],
) -> EngineState:
  """Reads the next chunk of a slot's prompt into its memory, in place.

  On a mesh the batch has a row for each rank, and those of the others are padding.

  Args:
    decoder: the model.
    state: the state before.
    slot: which slot.
    pages: [N] its pages.
    ids: [1, C] token ids.
    segment_ids: [1, C] 1 for a token, 0 for padding on the right.
  """
  row = _row(decoder, state, slot)
  cache = hybrid_cache.view_slot(state.pools, pages, state.length, row, _page_mesh(decoder))
  batch = (row.ranks, ids.shape[1])
  segments = jnp.where(row.owners(row.ranks)[:, None], segment_ids, 0)
  hidden, cache = decoder.hidden(jnp.broadcast_to(ids, batch), cache, segments)
  count = jnp.sum(segment_ids != 0)
  last = jax.lax.dynamic_index_in_dim(hidden, jnp.maximum(count - 1, 0), axis=1, keepdims=False)
  return dataclasses.replace(
    state,
    pools=hybrid_cache.store(state.pools, cache, row),
    length=state.length.at[slot].add(count.astype(jnp.int32)),
    hidden=row.put(state.hidden, last),
  )


def begin(decoder: nnx.Module, state: EngineState, slot: Int[Array, ""]) -> tuple[Picked, EngineState]:
  """Picks the first token of a slot whose prompt was read; the slot goes on from here in `decode`."""
  state = dataclasses.replace(state, active=state.active.at[slot].set(True))
  chosen = jnp.arange(state.active.shape[0]) == slot
  return _pick(decoder, state, state.hidden, chosen)


def decode(
  decoder: nnx.Module,
  state: EngineState,
  table: Int[Array, "S N"],
  limit: Int[Array, ""],
  chosen: Bool[Array, "S"],
  *,
  steps: int,
) -> tuple[Picked, EngineState]:
  """Runs up to `limit` steps of one token a chosen active slot, fewer when every one has stopped.

  Args:
    decoder: the model.
    state: the state before.
    table: [S, N] pages of every slot, enough for the tokens of this dispatch.
    limit: steps to run, at most `steps`; traced, so that a short dispatch compiles nothing.
    chosen: [S] the slots that go on; the others keep every bit.
    steps: M, the width of the result.
  """

  def unfinished(carry):
    index, _, state = carry
    return (index < limit) & jnp.any(state.active & chosen)

  def step(carry):
    index, picked, state = carry
    goes_on = state.active & chosen
    active = goes_on.astype(jnp.int32)
    cache = hybrid_cache.view(state.pools, table, state.length, _page_mesh(decoder))
    hidden, cache = decoder.hidden(state.token[:, None], cache, active[:, None])
    state = dataclasses.replace(
      state, pools=hybrid_cache.store(state.pools, cache), length=state.length + active
    )
    new, state = _pick(decoder, state, hidden[:, 0], goes_on)
    put = lambda whole, one: jax.lax.dynamic_update_slice_in_dim(whole, one, index, axis=1)
    return index + 1, jax.tree.map(put, picked, new), state

  S = state.active.shape[0]
  nothing = Picked(
    jnp.full((S, steps), NO_TOKEN, jnp.int32),
    jnp.zeros((S, steps), jnp.float32),
    jnp.zeros((S, steps, ALTERNATIVES), jnp.int32),
    jnp.zeros((S, steps, ALTERNATIVES), jnp.float32),
  )
  _, picked, state = jax.lax.while_loop(unfinished, step, (jnp.int32(0), nothing, state))
  return picked, state


def reset_slot(
  decoder: nnx.Module, state: EngineState, slot: Int[Array, ""], pages: Int[Array, "N"]
) -> EngineState:
  """Takes a slot from its request, and wipes its memory and its pages [N]."""
  row = _row(decoder, state, slot)
  state = _cleared(state, row)
  place = _page_mesh(decoder)
  nothing = jax.tree.map(jnp.zeros_like, hybrid_cache.take_slot(state.pools, pages, row, place))
  return dataclasses.replace(state, pools=hybrid_cache.put_slot(state.pools, nothing, pages, row, place))


def export_slot(
  decoder: nnx.Module, state: EngineState, slot: Int[Array, ""], pages: Int[Array, "N"]
) -> EngineState:
  """Copies out everything that a request needs to move or to pause: a state of one slot and N pages.

  Args:
    decoder: the model.
    state: the whole state, which stays as it is.
    slot: which slot.
    pages: [N] its pages.
  """
  row = _row(decoder, state, slot)
  return dataclasses.replace(
    jax.tree.map(row.take_alone, dataclasses.replace(state, pools=None)),
    pools=hybrid_cache.take_slot(state.pools, pages, row, _page_mesh(decoder)),
  )


def import_slot(
  decoder: nnx.Module, state: EngineState, slot: Int[Array, ""], pages: Int[Array, "N"], moved: EngineState
) -> EngineState:
  """Gives a slot and its pages [N] to an exported request, which goes on as if it had never left."""
  row = _row(decoder, state, slot)
  rest, one = (dataclasses.replace(each, pools=None) for each in (state, moved))
  return dataclasses.replace(
    jax.tree.map(row.put, rest, one),
    pools=hybrid_cache.put_slot(state.pools, moved.pools, pages, row, _page_mesh(decoder)),
  )


def _row(decoder: nnx.Module, state: EngineState, slot: Int[Array, ""]) -> SlotRow:
  ranks = 1 if decoder.layout is None else decoder.layout.parts("activation_batch")
  return SlotRow(slot, state.length.shape[0], ranks)


def _page_mesh(decoder: nnx.Module) -> PageMesh | None:
  return decoder.layout and decoder.layout.pages


def _cleared(state: EngineState, row: SlotRow) -> EngineState:
  """Zeros the recurrent row, the counts and the marks of a slot."""

  def wipe(layer, is_stacked):
    if isinstance(layer, LatentPool):
      return layer
    return jax.tree.map(lambda x: row.put(x, 0, is_stacked), layer)

  names = ("length", "hidden", "token", "remaining", "counts", "active")
  return dataclasses.replace(
    state,
    **{name: row.put(getattr(state, name), 0) for name in names},
    pools=hybrid_cache.map_layers(hybrid_cache.Pools, wipe, state.pools),
    finite=row.put(state.finite, True),
  )


def _pick(
  decoder: nnx.Module, state: EngineState, hidden: Float[Array, "S D"], chosen: Bool[Array, "S"]
) -> tuple[Picked, EngineState]:
  """Picks one token in the chosen slots, and says which of them go on."""
  logits = decoder.logits(hidden).astype(jnp.float32)
  settings = state.settings
  seen = (state.counts > 0) * settings.presence_penalty[:, None]
  penalised = logits - seen - state.counts * settings.frequency_penalty[:, None]
  token = sample(penalised, state.length, settings.sampling)
  is_finite = jnp.all(jnp.isfinite(logits), axis=-1)
  stops = jnp.any(token[:, None] == settings.stop_ids, axis=-1)
  remaining = state.remaining - chosen
  goes_on = is_finite & ~stops & (remaining > 0)
  slots = jnp.arange(token.shape[0])
  after = dataclasses.replace(
    state,
    token=jnp.where(chosen, token, state.token),
    remaining=remaining,
    active=jnp.where(chosen, goes_on, state.active),
    finite=state.finite & (is_finite | ~chosen),
    counts=state.counts.at[slots, token].add(chosen.astype(jnp.int32)),
  )
  shown = jnp.where(chosen & is_finite, token, NO_TOKEN)
  return _described(logits, shown, jnp.where(chosen, settings.alternatives, 0)), after


def _described(logits: Float[Array, "S V"], token: Int[Array, "S"], alternatives: Int[Array, "S"]) -> Picked:
  """One step of `Picked`: tokens, their log-probabilities, and alternatives where any slot wants them."""
  norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  own = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=-1) - norm
  count = min(ALTERNATIVES, logits.shape[-1])

  def best():
    values, ids = jax.lax.top_k(logits, count)
    widen = lambda x: jnp.pad(x, ((0, 0), (0, ALTERNATIVES - count)))
    return widen(ids.astype(jnp.int32)), widen(values - norm)

  shape = (token.shape[0], ALTERNATIVES)
  none = lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
  ids, values = jax.lax.cond(jnp.any(alternatives > 0), best, none)
  return Picked(token[:, None], own, ids[:, None], values[:, None])
