"""The memory of many requests: one recurrent row per slot, and latents in pages that all slots share.

Which pages a slot owns is the host's knowledge: every program gets the page table as an argument.

Dims: S slots, N pages of a slot, G pages of the pool, J tokens of a page, C stacked layers, R+P latent width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from MaxText.configs.schema import Config
from MaxText.layers.cache import DecoderCache, KdaCache, MlaCache, MlaPages
from MaxText.models.kimi_k3 import init_cache
from MaxText.models.layer_plan import LayerPlan

Leaf = Any  # an array, or what JAX puts in its place: a shape, a sharding, a tracer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPool:
  """Pages of one full-attention layer: [G, J, R+P], or [C, G, J, R+P] of stacked layers."""

  latent: Leaf


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


def empty_pools(cfg: Config, plan: LayerPlan, slots: int, pages: int, page_size: int) -> Pools:
  """Returns the memory of `slots` slots and of a pool of `pages` pages, all zero."""

  def pooled(layer, _):
    if not isinstance(layer, MlaCache):
      return layer
    *stack, _, _, width = layer.latent.shape
    return LatentPool(jnp.zeros((*stack, pages, page_size, width), layer.latent.dtype))

  return map_layers(Pools, pooled, init_cache(cfg, plan, slots, 1))


def view(
  pools: Pools, table: Int[Array, "B N"], length: Int[Array, "B"], slot: Int[Array, ""] | None = None
) -> DecoderCache:
  """Returns the memory as the decoder takes it.

  Args:
    pools: from `empty_pools`.
    table: [B, N] pages of each row of the batch.
    length: [B] tokens held by each.
    slot: the only slot of the batch; None for all of them.
  """

  def shown(layer, is_stacked):
    if isinstance(layer, LatentPool):
      lengths = jnp.broadcast_to(length, (*layer.latent.shape[:is_stacked], *length.shape))
      return MlaPages(layer.latent, table, lengths)
    if slot is None:
      return layer
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=is_stacked), layer)

  return map_layers(DecoderCache, shown, pools)


def store(pools: Pools, new: DecoderCache, slot: Int[Array, ""] | None = None) -> Pools:
  """Returns `pools` with what the decoder made of their `view` of the same slot."""

  def stored(old, layer, is_stacked):
    if isinstance(layer, MlaPages):
      return LatentPool(layer.latent)
    if slot is None:
      return layer
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), slot, axis=is_stacked)
    return jax.tree.map(put, old, layer)

  return map_layers(Pools, stored, pools, new)


def take_slot(pools: Pools, pages: Int[Array, "N"], slot: Int[Array, ""]) -> Pools:
  """Copies out what a slot holds: its recurrent rows, and N pages whether it owns them or not (those are 0).

  Args:
    pools: from `empty_pools`.
    pages: [N] pages of the slot, G where it has none.
    slot: which recurrent row.
  """

  def taken(layer, is_stacked):
    if isinstance(layer, KdaCache):
      return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=is_stacked), layer)
    index = (slice(None), pages) if is_stacked else pages
    return LatentPool(layer.latent.at[index].get(mode="fill", fill_value=0))

  return map_layers(Pools, taken, pools)


def put_slot(pools: Pools, held: Pools, pages: Int[Array, "N"], slot: Int[Array, ""]) -> Pools:
  """Writes what `take_slot` gave into a slot and its pages; a page that the slot does not own is dropped.

  Args:
    pools: from `empty_pools`.
    held: from `take_slot`.
    pages: [N] pages of the slot, G where it has none.
    slot: which recurrent row.
  """

  def put(layer, new, is_stacked):
    if isinstance(layer, KdaCache):
      write = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis=is_stacked)
      return jax.tree.map(write, layer, new)
    index = (slice(None), pages) if is_stacked else pages
    return LatentPool(layer.latent.at[index].set(new.latent, mode="drop"))

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
