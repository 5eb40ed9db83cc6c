"""The memory of many requests: one recurrent row per slot, and latents in pages that all slots share.

Which pages a slot owns is the host's knowledge: every program gets the page table as an argument.

On a mesh the rows of S slots are split over their devices, and so are the pages: a rank is a part of either.
A dimension that is split is never indexed by a slot, only by a slot's place within its rank, and all ranks do
the same at once: what is a slot's stays on its devices.

Dims: S slots, N pages of a slot, Z ranks, Q slots of a rank, G pages of a rank, J tokens of a page,
C stacked layers, R+P latent width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from MaxText.configs.schema import Config
from MaxText.kernels.mla import PageMesh, on_ranks
from MaxText.layers.cache import DecoderCache, KdaCache, LatentPool, MlaCache, MlaPages
from MaxText.models.kimi_k3 import init_cache
from MaxText.models.layer_plan import LayerPlan

Leaf = Any  # an array, or what JAX puts in its place: a shape, a sharding, a tracer


@dataclasses.dataclass(frozen=True)
class SlotRow:
  """One slot, and where its row is among those of all slots.

  Attributes:
    slot: int32, which one.
    slots: S.
    ranks: Z, parts into which the rows of all slots are split, in order.
  """

  slot: Int[Array, ""]
  slots: int
  ranks: int = 1

  def owners(self, parts: int) -> Bool[Array, "parts"]:
    """Says which of so many equal parts of all slots has this one."""
    return jnp.arange(parts) == self.slot // (self.slots // parts)

  def take(self, rows: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
    """Takes a row out of every rank, which is that of the slot in its own and 0 in the others."""
    return jnp.where(self._mask(rows, axis), self._same_place(rows, axis), 0)

  def take_alone(self, rows: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
    """Takes the row of the slot, and shows it to all ranks."""
    return jnp.expand_dims(_sum(self.take(rows, axis), axis), axis)

  def put(
    self, rows: Shaped[Array, "..."], new: Shaped[Array, "..."] | int, axis: int = 0
  ) -> Shaped[Array, "..."]:
    """Replaces the row of the slot by that of its rank in `new`, or by the only one; all others stay."""
    new = jnp.asarray(new, rows.dtype)
    one = jnp.where(self._mask(rows, axis), new, self._same_place(rows, axis))
    split = jax.lax.dynamic_update_index_in_dim(self._split(rows, axis), one, self._place, axis + 1)
    return split.reshape(rows.shape)

  @property
  def _place(self) -> Int[Array, ""]:
    return self.slot % (self.slots // self.ranks)

  def _split(self, rows, axis):
    return rows.reshape(*rows.shape[:axis], self.ranks, -1, *rows.shape[axis + 1 :])

  def _same_place(self, rows, axis):
    return jax.lax.dynamic_index_in_dim(self._split(rows, axis), self._place, axis + 1, keepdims=False)

  def _mask(self, rows, axis):
    return self.owners(self.ranks).reshape(-1, *[1] * (rows.ndim - axis - 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pools:
  """Memory of the whole stack for all slots, in the shape of a `DecoderCache`.

  Attributes:
    layers: a `KdaCache` of S rows or a `LatentPool` for each layer of an unrolled stack, or of the prologue.
    cycles: the same, stacked, for each position of the scanned cycle.
    epilogue: the same for each layer behind the scanned cycles.
  """

  layers: tuple[Leaf, ...]
  cycles: tuple[Leaf, ...] = ()
  epilogue: tuple[Leaf, ...] = ()


def empty_pools(cfg: Config, plan: LayerPlan, slots: int, pages: int, page_size: int, ranks: int) -> Pools:
  """Returns the memory of `slots` slots and of `pages` pages in `ranks` parts, all zero."""

  def pooled(layer, _):
    if not isinstance(layer, MlaCache):
      return layer
    *stack, _, _, width = layer.latent.shape
    return LatentPool(jnp.zeros((*stack, ranks, pages // ranks, page_size, width), layer.latent.dtype))

  return map_layers(Pools, pooled, init_cache(cfg, plan, slots, 1))


def view(
  pools: Pools, table: Int[Array, "S N"], length: Int[Array, "S"], place: PageMesh | None
) -> DecoderCache:
  """Returns the memory of all slots as the decoder takes it.

  Args:
    pools: from `empty_pools`.
    table: [S, N] pages of each slot, numbered within its rank, G where there is none.
    length: [S] tokens held by each.
    place: the devices of the ranks, or None for one.
  """

  def viewed(layer, is_stacked):
    return layer if isinstance(layer, KdaCache) else _paged(layer, table, length, place)

  return map_layers(DecoderCache, viewed, pools)


def view_slot(
  pools: Pools, pages: Int[Array, "N"], length: Int[Array, "S"], row: SlotRow, place: PageMesh | None
) -> DecoderCache:
  """Returns the memory of one slot: a batch of a row for each rank, all of them empty but the slot's own.

  Args:
    pools: from `empty_pools`.
    pages: [N] pages of the slot, numbered within its rank, G where there is none.
    length: [S] tokens held by each slot.
    row: which slot.
    place: the devices of the ranks, or None for one.
  """

  def viewed(layer, is_stacked):
    if isinstance(layer, KdaCache):
      return jax.tree.map(lambda x: row.take(x, is_stacked), layer)
    parts = max(row.ranks, layer.latent.shape[is_stacked])
    return _paged(layer, _own_pages(layer, pages, row, parts), row.take(length), place)

  return map_layers(DecoderCache, viewed, pools)


def store(pools: Pools, new: DecoderCache, row: SlotRow | None = None) -> Pools:
  """Returns `pools` with what the decoder made of their view, of all slots or of one."""

  def stored(old, layer, is_stacked):
    if isinstance(layer, MlaPages):
      return LatentPool(layer.latent)
    return layer if row is None else jax.tree.map(lambda x, y: row.put(x, y, is_stacked), old, layer)

  return map_layers(Pools, stored, pools, new)


def take_slot(pools: Pools, pages: Int[Array, "N"], row: SlotRow, place: PageMesh | None) -> Pools:
  """Copies out what a slot holds: its recurrent rows, and N pages whether it owns them or not (those are 0).

  Args:
    pools: from `empty_pools`.
    pages: [N] pages of the slot, numbered within its rank, G where it has none.
    row: which slot.
    place: the devices of the ranks, or None for one.
  """

  def taken(layer, is_stacked):
    if isinstance(layer, KdaCache):
      return jax.tree.map(lambda x: row.take_alone(x, is_stacked), layer)
    table = _own_pages(layer, pages, row, layer.latent.shape[is_stacked])
    gather = lambda pool, _, pages: pool.at[_pages(pages, is_stacked)].get(mode="fill", fill_value=0)[None]
    return LatentPool(_sum(on_ranks(gather, place, layer.latent, (), table, out_axis=0), 0))

  return map_layers(Pools, taken, pools)


def put_slot(
  pools: Pools, held: Pools, pages: Int[Array, "N"], row: SlotRow, place: PageMesh | None
) -> Pools:
  """Writes what `take_slot` gave into a slot and its pages; a page that the slot does not own is dropped.

  Args:
    pools: from `empty_pools`.
    held: from `take_slot`.
    pages: [N] pages of the slot, numbered within its rank, G where it has none.
    row: which slot.
    place: the devices of the ranks, or None for one.
  """

  def put(layer, new, is_stacked):
    if isinstance(layer, KdaCache):
      return jax.tree.map(lambda x, y: row.put(x, y, is_stacked), layer, new)
    table = _own_pages(layer, pages, row, layer.latent.shape[is_stacked])
    scatter = lambda pool, new, pages: pool.at[_pages(pages, is_stacked)].set(new, mode="drop")
    return LatentPool(on_ranks(scatter, place, layer.latent, new.latent, table, out_axis=is_stacked))

  return map_layers(Pools, put, pools, held)


def map_layers[Kind: (Pools, DecoderCache)](
  kind: type[Kind], function: Callable, *memories: Pools | DecoderCache
) -> Kind:
  """Returns the `kind` of memory whose layers are `function(layer of each memory, whether it is stacked)`."""
  parts = {}
  for field in dataclasses.fields(kind):
    layers = zip(*(getattr(memory, field.name) for memory in memories), strict=True)
    parts[field.name] = tuple(function(*each, int(field.name == "cycles")) for each in layers)
  return kind(**parts)


def _paged(
  pool: LatentPool, table: Int[Array, "ZQ N"], length: Int[Array, "B"], place: PageMesh | None
) -> MlaPages:
  *stack, Z, _, _, _ = pool.latent.shape
  lengths = jnp.broadcast_to(length, (*stack, *length.shape))
  return MlaPages(pool.latent, table.reshape(Z, -1, table.shape[-1]), lengths, place=place)


def _own_pages(pool: LatentPool, pages: Int[Array, "N"], row: SlotRow, parts: int) -> Int[Array, "parts N"]:
  """The pages of a slot in its own of some equal parts of all slots; the others have none."""
  return jnp.where(row.owners(parts)[:, None], pages, pool.latent.shape[-3])


def _pages(pages: Int[Array, "N"], is_stacked: int):
  return (*[slice(None)] * is_stacked, 0, pages)


def _sum(parts: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
  """Adds up ranks of which all but one are 0; a single one keeps every bit, the sign of a zero included."""
  return jnp.squeeze(parts, axis) if parts.shape[axis] == 1 else jnp.sum(parts, axis, dtype=parts.dtype)
