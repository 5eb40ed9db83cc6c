"""What a layer remembers between calls. Layouts are named and typed; a swapped one fails in the tests.

A cache is either one layer's own, or a pool stacked over the cycles of a scan ([C, ...] on every leaf), in
which case `row` says whose turn it is. Pools are carried whole and written by index, never restacked.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText.kernels.mla import PageMesh, Pages

Row = Int[Array, ""] | None
Leaf = Any  # an array, or what JAX puts in its place: a shape, a sharding, a tracer


class LayerMemory:
  """A layer's own memory, or the pool of a stack that it takes one slice from and puts one slice back to."""

  def read[Memory: "LayerMemory"](self: Memory, row: Row) -> Memory:
    """Returns this layer's own memory."""
    if row is None:
      return self
    # the barrier makes it a value of its own: read again behind the write, XLA would copy the pool first
    return jax.lax.optimization_barrier(jax.tree.map(lambda pool: pool[row], self))

  def write[Memory: "LayerMemory"](self: Memory, row: Row, new: Memory) -> Memory:
    """Replaces this layer's memory by `new`, keeping the stored dtypes."""
    new = jax.tree.map(lambda old, value: value.astype(old.dtype), self, new)
    if row is None:
      return new
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda pool, value: put(pool, value, row, axis=0), self, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaCache(LayerMemory):
  """Memory of one linear-attention layer.

  Attributes:
    conv: [B, W-1, 3, H*K] last inputs of the q, k and v convolutions, activation dtype.
    state: [B, H, K, V] recurrent memory, float32.
  """

  conv: Leaf
  state: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaCache(LayerMemory):
  """Latents of one full-attention layer, left-aligned; rows of a batch may have different lengths.

  Attributes:
    latent: [B, S, R+P] normed latent and unrotated tail of each token, activation dtype.
    length: [B] int32, tokens held by each row, 0 <= length <= S.
  """

  latent: Leaf
  length: Leaf

  @property
  def pages(self) -> Leaf:
    """What attention reads: [B, S, R+P]."""
    return self.latent

  def append(self, new: Float[Array, "B T RP"], segment_ids: Int[Array, "B T"] | None) -> "MlaCache":
    """Writes the valid new latents of one layer after each row's length.

    Args:
      new: [B, T, R+P] latents of this call's tokens.
      segment_ids: [B, T], 0 = padding. A row that ends in another segment than it began with keeps the last.

    The caller guarantees length + new tokens <= S; a latent past the end is dropped, never wrapped.
    """
    B, T, _ = new.shape
    S = self.latent.shape[-2]
    slot, total = _slots(self.length, T, segment_ids)
    slot = jnp.where(slot < 0, S, slot)  # past the end: dropped
    latent = self.latent.at[jnp.arange(B)[:, None], slot].set(new.astype(self.latent.dtype), mode="drop")
    return MlaCache(latent, jnp.minimum(total, S))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPool:
  """Pages of one full-attention layer between calls, G of each of Z ranks.

  Attributes:
    latent: [Z, G, J, R+P], or [C, Z, G, J, R+P] of stacked layers, activation dtype.
  """

  latent: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaPages:
  """Latents of one full-attention layer (or of a stack) in pages of a pool that all rows share.

  A layer reads and writes pages of the pool by index: neither the pool nor a layer's share of it is copied.

  Attributes:
    latent: [Z, G, J, R+P] pages, or [C, Z, G, J, R+P] of stacked layers, activation dtype.
    table: [Z, Q, N] int32 pages of each row, as `Pages` has them; the same for all layers of a stack.
    length: [B] int32, or [C, B]: tokens held by each row.
    row: which layer of the stack this is, between `read` and `write`.
    place: the devices of the Z ranks, or None for a single one.
  """

  latent: Leaf
  table: Leaf
  length: Leaf
  row: Leaf = None
  place: PageMesh | None = dataclasses.field(default=None, metadata={"static": True})

  def read(self, row: Row) -> "MlaPages":
    """Returns this layer's own view."""
    return self if row is None else dataclasses.replace(self, length=self.length[row], row=row)

  @property
  def pages(self) -> Pages:
    """What attention reads."""
    return Pages(self.latent, self.table, self.row, self.place)

  def append(self, new: Float[Array, "B T RP"], segment_ids: Int[Array, "B T"] | None) -> "MlaPages":
    """Writes the valid new latents of one layer after each row's length; arguments as `MlaCache.append`.

    Args:
      new: [B, T, R+P] latents of this call's tokens.
      segment_ids: [B, T], 0 = padding.
    """
    slot, total = _slots(self.length, new.shape[1], segment_ids)
    pages = self.pages.write(slot, new)
    return dataclasses.replace(self, latent=pages.pool, length=jnp.minimum(total, pages.capacity))

  def write(self, row: Row, new: "MlaPages") -> "MlaPages":
    """Replaces this layer's memory by `new`, which `append` made of this layer's view."""
    if row is None:
      return new
    return dataclasses.replace(self, latent=new.latent, length=self.length.at[row].set(new.length))


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


LayerCache = KdaCache | MlaCache | MlaPages


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
