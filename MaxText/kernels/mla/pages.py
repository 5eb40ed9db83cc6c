"""Cache rows that lie in the pages of a pool which many sequences share.

A pool has ranks, which share no page: one, or on a mesh those of the devices that hold parts of it. The rank
is a dimension of pool and table, and each device reads and writes the pages of its own rank: no page travels.

Dims: B rows of the batch, Z ranks, Q rows of a rank, N pages of a row, G pages of a rank, J cache rows of a
page, C stacked layers, Y width of a cache row, S = N * J.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

Leaf = Any  # an array, or what JAX puts in its place: a shape, a sharding, a tracer


@dataclasses.dataclass(frozen=True)
class PageMesh:
  """The devices that hold a pool.

  Attributes:
    mesh: of the whole program.
    axes: those that split the ranks; on all other axes, devices hold the same pages.
  """

  mesh: Mesh | AbstractMesh
  axes: tuple[str, ...]


def on_ranks(
  of_rank: Callable,
  place: PageMesh | None,
  pool: Float[Array, "*C Z G J Y"],
  shared: Any,
  *arrays: Shaped[Array, "Z ..."],
  out_axis: int,
) -> Array:
  """Runs a function on every rank, each on its own devices.

  Args:
    of_rank: (pool with Z = 1, `shared`, arrays of a rank) -> array with an axis of 1 for the rank.
    place: the devices of the Z ranks, or None for a single rank.
    pool: [Z, G, J, Y], or [C, Z, G, J, Y] of stacked layers.
    shared: arrays that every rank gets whole.
    *arrays: [Z, ...] each.
    out_axis: where the ranks come in the result.
  """
  axis = pool.ndim - 4

  # a device has one rank, which is indexed: batched or reshaped, a scatter would copy the pool
  def local(pool, shared, *arrays):
    return of_rank(pool, shared, *[each[0] for each in arrays])

  if place is None:
    return local(pool, shared, *arrays)
  split = lambda axis: PartitionSpec(*[None] * axis, place.axes)
  in_specs = (split(axis), PartitionSpec(), *[split(0)] * len(arrays))
  run = jax.shard_map(local, mesh=place.mesh, in_specs=in_specs, out_specs=split(out_axis))
  return run(pool, shared, *arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """The cache rows of a batch, read page by page; stands where an array [B, S, Y] could.

  Attributes:
    pool: [Z, G, J, Y] pages, or [C, Z, G, J, Y] of stacked layers.
    table: [Z, Q, N] int32 page, numbered within its rank, that holds tokens n*J to (n+1)*J - 1; G where there
      is none. The Z*Q rows are those of the batch in order. Where they are more, each row of the batch has as
      many of them, neighbours, and one alone has pages.
    layer: which layer of a stacked pool, int32; None for a pool of its own. The stack is indexed, not sliced.
    place: the devices of the ranks, or None for a single rank.
  """

  pool: Leaf
  table: Leaf
  layer: Leaf = None
  place: PageMesh | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def page_size(self) -> int:
    """Cache rows of a page, J."""
    return self.pool.shape[-2]

  @property
  def capacity(self) -> int:
    """Cache rows that a row of the batch may hold, S = N * J."""
    return self.table.shape[-1] * self.page_size

  def read(self, start: int | Int[Array, ""], size: int, length: Int[Array, "B"]) -> Float[Array, "B size Y"]:
    """Gathers the rows of some whole pages.

    Args:
      start: first cache row, a multiple of J.
      size: cache rows to read, a multiple of J.
      length: [B] rows that count; what lies behind them belongs to nobody and reads as 0, so that no value
        that an earlier tenant left, not even NaN, meets a weight of zero.
    """
    J, B = self.page_size, length.shape[0]
    pages = jax.lax.dynamic_slice_in_dim(self.table, start // J, size // J, axis=2)
    gather = lambda pool, at, pages: pool.at[*at, 0, pages].get(mode="fill", fill_value=0)[None]
    rows = on_ranks(gather, self.place, self.pool, self._at, pages, out_axis=0)
    rows = rows.reshape(B, -1, size, rows.shape[-1])
    # of the ranks of one row all but one have no page, and gave 0
    rows = rows[:, 0] if rows.shape[1] == 1 else jnp.sum(rows, axis=1)
    held = start + jnp.arange(size) < length[:, None]
    rows = jnp.where(held[..., None], rows, 0)
    if self.place is None:
      return rows
    # left to itself, the compiler may cut them over axes that are free, and gather them again
    by = self.place.axes if B == math.prod(self.table.shape[:2]) else PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(
      rows, NamedSharding(self.place.mesh, PartitionSpec(by, None, None))
    )

  def write(self, slot: Int[Array, "B T"], new: Float[Array, "B T Y"]) -> "Pages":
    """Stores rows; what has no slot (a negative one) or no page is dropped, never wrapped.

    Args:
      slot: [B, T] position of each new row in its sequence, -1 for one that is not stored.
      new: [B, T, Y] rows.
    """
    G, J = self.pool.shape[-3:-1]
    slot, new = self._by_rank(slot), self._by_rank(new.astype(self.pool.dtype))
    inside = (slot >= 0) & (slot < self.capacity)
    page = jnp.take_along_axis(self.table, jnp.where(inside, slot // J, 0), axis=2)
    page = jnp.where(inside, page, G)
    scatter = lambda pool, at, page, row, new: pool.at[*at, 0, page, row].set(new, mode="drop")
    pool = on_ranks(
      scatter, self.place, self.pool, self._at, page, slot % J, new, out_axis=self.pool.ndim - 4
    )
    return dataclasses.replace(self, pool=pool)

  @property
  def _at(self) -> tuple[Int[Array, ""], ...]:
    return () if self.layer is None else (self.layer,)

  def _by_rank(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "Z Q ..."]:
    """Gives each rank its rows of the batch; a row of several ranks goes to all of them."""
    Z, Q, _ = self.table.shape
    copies = jnp.broadcast_to(x[:, None], (x.shape[0], Z * Q // x.shape[0], *x.shape[1:]))
    return copies.reshape(Z, Q, *x.shape[1:])


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
