"""Cache rows that lie in the pages of a pool which many sequences share.

Dims: B rows of the batch, N pages of a row, G pages of the pool, J cache rows of a page, C stacked layers,
Y width of a cache row, S = N * J.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Leaf = Any  # an array, or what JAX puts in its place: a shape, a sharding, a tracer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """The cache rows of a batch, read page by page; stands where an array [B, S, Y] could.

  Attributes:
    pool: [G, J, Y] pages, or [C, G, J, Y] of stacked layers.
    table: [B, N] int32 page that holds tokens n*J to (n+1)*J - 1 of each row; G where there is none.
    layer: which layer of a stacked pool, int32; None for a pool of its own. The stack is indexed, not sliced.
  """

  pool: Leaf
  table: Leaf
  layer: Leaf = None

  @property
  def page_size(self) -> int:
    """Cache rows of a page, J."""
    return self.pool.shape[-2]

  @property
  def capacity(self) -> int:
    """Cache rows that a row of the batch may hold, S = N * J."""
    return self.table.shape[1] * self.page_size

  def read(self, start: int | Int[Array, ""], size: int, length: Int[Array, "B"]) -> Float[Array, "B size Y"]:
    """Gathers the rows of some whole pages.

    Args:
      start: first cache row, a multiple of J.
      size: cache rows to read, a multiple of J.
      length: [B] rows that count; what lies behind them belongs to nobody and reads as 0, so that no value
        that an earlier tenant left, not even NaN, meets a weight of zero.
    """
    J = self.page_size
    pages = jax.lax.dynamic_slice_in_dim(self.table, start // J, size // J, axis=1)
    index = pages if self.layer is None else (self.layer, pages)
    rows = self.pool.at[index].get(mode="fill", fill_value=0)
    rows = rows.reshape(pages.shape[0], size, -1)
    held = start + jnp.arange(size) < length[:, None]
    return jnp.where(held[..., None], rows, 0)

  def write(self, slot: Int[Array, "B T"], new: Float[Array, "B T Y"]) -> "Pages":
    """Stores rows; what has no slot (a negative one) or no page is dropped, never wrapped.

    Args:
      slot: [B, T] position of each new row in its sequence, -1 for one that is not stored.
      new: [B, T, Y] rows.
    """
    G, J = self.pool.shape[-3:-1]
    inside = (slot >= 0) & (slot < self.capacity)
    page = jnp.take_along_axis(self.table, jnp.where(inside, slot // J, 0), axis=1)
    place = (jnp.where(inside, page, G), slot % J)
    index = place if self.layer is None else (self.layer, *place)
    return dataclasses.replace(self, pool=self.pool.at[index].set(new.astype(self.pool.dtype), mode="drop"))


Rows = Float[Array, "B S Y"] | Pages


def capacity(rows: Rows) -> int:
  """Returns S, the cache rows that each row of the batch may hold."""
  return rows.capacity if isinstance(rows, Pages) else rows.shape[1]


def read_rows(
  rows: Rows, start: int | Int[Array, ""], size: int, length: Int[Array, "B"]
) -> Float[Array, "B size Y"]:
  """Returns cache rows start to start + size - 1 of each row of the batch.

  Args:
    rows: [B, S, Y], or pages.
    start: first cache row; of pages, a multiple of their size.
    size: cache rows to read.
    length: [B] rows that count.
  """
  if isinstance(rows, Pages):
    return rows.read(start, size, length)
  return jax.lax.dynamic_slice_in_dim(rows, start, size, axis=1)
