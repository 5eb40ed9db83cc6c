"""What a layer remembers between calls. Layouts are named and typed; a swapped one fails in the tests.

A cache is either one layer's own, or a pool stacked over the cycles of a scan ([C, ...] on every leaf), in
which case `row` says whose turn it is. Pools are carried whole and written by index, never restacked.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Row = Int[Array, ""] | None
Leaf = Any  # an array, or what JAX puts in its place: a shape, a sharding, a tracer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaCache:
  """Memory of one linear-attention layer.

  Attributes:
    conv: [B, W-1, 3, H*K] last inputs of the q, k and v convolutions, activation dtype.
    state: [B, H, K, V] recurrent memory, float32.
  """

  conv: Leaf
  state: Leaf

  def read(self, row: Row) -> "KdaCache":
    """Returns this layer's own memory."""
    return self if row is None else _take(self, row)

  def write(self, row: Row, new: "KdaCache") -> "KdaCache":
    """Replaces this layer's memory by `new`, keeping the stored dtypes."""
    if row is None:
      return jax.tree.map(lambda old, value: value.astype(old.dtype), self, new)
    return jax.tree.map(lambda pool, value: _replace(pool, value, row), self, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaCache:
  """Latents of one full-attention layer, left-aligned; rows of a batch may have different lengths.

  Attributes:
    latent: [B, S, R+P] normed latent and unrotated tail of each token, activation dtype.
    length: [B] int32, tokens held by each row, 0 <= length <= S.
  """

  latent: Leaf
  length: Leaf

  def prefix(self, row: Row) -> tuple[Float[Array, "B S RP"], Int[Array, "B"]]:
    """Returns this layer's latents [B, S, R+P] and lengths [B], read-only."""
    own = self if row is None else _take(self, row)
    return own.latent, own.length

  def append(
    self, new: Float[Array, "B T RP"], segment_ids: Int[Array, "B T"] | None, row: Row
  ) -> "MlaCache":
    """Writes the valid new latents after each row's length.

    Args:
      new: [B, T, R+P] latents of this call's tokens.
      segment_ids: [B, T], 0 = padding. A row that ends in another segment than it began with keeps the last.
      row: which layer of a stacked pool.

    The caller guarantees length + new tokens <= S; a latent past the end is dropped, never wrapped.
    """
    B, T, _ = new.shape
    S = self.latent.shape[-2]
    latent, length = self.prefix(row)
    slot, total = _slots(length, T, segment_ids)
    slot = jnp.where(slot < 0, S, slot)  # past the end: dropped
    latent = latent.at[jnp.arange(B)[:, None], slot].set(new.astype(latent.dtype), mode="drop")
    own = MlaCache(latent, jnp.minimum(total, S))
    # one slice goes back: scattered tokens of a carried pool made XLA:CPU copy the whole pool, twice a layer
    return own if row is None else jax.tree.map(lambda pool, value: _replace(pool, value, row), self, own)


def _take[Cache: (KdaCache, MlaCache)](pools: Cache, row: Int[Array, ""]) -> Cache:
  """One layer's slice of every pool."""
  # the barrier makes it a value of its own: read again behind the write, XLA would copy the whole pool first
  return jax.lax.optimization_barrier(jax.tree.map(lambda pool: pool[row], pools))


def _replace(pool: Array, value: Array, row: Int[Array, ""]) -> Array:
  return jax.lax.dynamic_update_index_in_dim(pool, value.astype(pool.dtype), row, axis=0)


def _slots(
  length: Int[Array, "B"], T: int, segment_ids: Int[Array, "B T"] | None
) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
  """Slot of each new token (-1: not stored) and the row lengths afterwards."""
  if segment_ids is None:
    return length[:, None] + jnp.arange(T), length + T
  valid = segment_ids != 0
  position = jnp.arange(T)
  first = jnp.take_along_axis(segment_ids, jnp.argmax(valid, axis=1)[:, None], axis=1)
  last = jnp.take_along_axis(segment_ids, jnp.argmax(valid * (position + 1), axis=1)[:, None], axis=1)
  kept = valid & (segment_ids == last)
  start = jnp.where(first == last, length[:, None], 0)
  slot = jnp.where(kept, start + jnp.cumsum(kept, axis=1) - 1, -1)
  return slot, start[:, 0] + jnp.sum(kept, axis=1, dtype=length.dtype)


LayerCache = KdaCache | MlaCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderCache:
  """Memory of the whole stack, in the shape of its parts.

  Attributes:
    layers: one cache per layer of an unrolled stack, or of the prologue.
    cycles: one stacked pool per position of the scanned cycle.
    epilogue: one cache per layer behind the scanned cycles.
  """

  layers: tuple[LayerCache, ...]
  cycles: tuple[LayerCache, ...] = ()
  epilogue: tuple[LayerCache, ...] = ()
