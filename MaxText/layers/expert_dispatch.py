"""Routed experts on many devices: each device computes the experts that it holds.

`local_experts` shows every device all tokens of its group and adds the partial sums up once.
`ragged_all_to_all` gives each device its own tokens, sends each row to the device of its expert and back. In
neither does a weight travel, and in neither is an expert computed that has no rows.

Dims: M tokens, L expert input width, A experts of a token, E experts of a device, R rows of a buffer,
N devices that share the experts, F expert width, C stacked layers. Source: spec 2.7 steps 3 and 4.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from MaxText.configs.schema import Config
from MaxText.kernels.carries import match_manual_axes
from MaxText.kernels.expert_exchange import ragged_all_to_all
from MaxText.kernels.grouped_matmul import grouped_matmul, grouped_mlp
from MaxText.kernels.mxfp4 import MxFp4, pack
from MaxText.layers.cache import Row
from MaxText.layers.lora import ExpertChange
from MaxText.layers.situ import gated_activation

Narrow = Float[Array, "*C E F L"] | MxFp4
Wide = Float[Array, "*C E L F"] | MxFp4
Changes = tuple[ExpertChange | None, ExpertChange | None, ExpertChange | None]

_UNCHANGED: Changes = (None, None, None)

_SMALL = 1024
"""Rows up to which one buffer holds them all, whichever device they belong to."""


@dataclasses.dataclass(frozen=True)
class ExpertMesh:
  """The devices, and which mesh axes split what; all of these axes have more than one device.

  Attributes:
    mesh: of the whole program.
    batch: axes that split the tokens outside the experts.
    expert: axes that split the experts; the first counts slowest.
    width: axes that split the width of each expert.
  """

  mesh: Mesh | AbstractMesh
  batch: tuple[str, ...]
  expert: tuple[str, ...]
  width: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OwnExperts:
  """The experts that one device holds, or its slice of their width.

  Attributes:
    cfg: the model.
    weights: w1, w3 and w2 of the E experts.
    row: which layer of a stack.
    changes: what low-rank adapters add to the three matrices.
  """

  cfg: Config
  weights: tuple[Narrow, Narrow, Wide]
  row: Row
  changes: Changes = _UNCHANGED

  @property
  def count(self) -> int:
    """E."""
    return self.weights[0].shape[-3]

  def __call__(self, rows: Float[Array, "R L"], sizes: Int[Array, "E"]) -> Float[Array, "R L"]:
    """Runs rows [R, L], those of the first expert first; sizes [E] are the rows of each."""
    weights, row = self.weights, self.row
    on_grid = self.cfg.mxfp4_qat and not self.cfg.packs_experts
    if on_grid and row is not None:  # a stack in which one layer is rounded, not all of them each time
      weights, row = [w[row] for w in weights], None
    if any(change is not None for change in self.changes):
      weights = [pack(w) for w in weights] if on_grid else weights  # frozen below the adapters
      return self._changed(rows, sizes, weights, row)
    activation, impl = gated_activation(self.cfg), self.cfg.moe_impl
    return grouped_mlp(rows, *weights, sizes, activation, layer=row, on_grid=on_grid, impl=impl)

  def _changed(self, rows, sizes, weights, layer):
    """Outputs [R, L] of which each product has what its adapter adds."""
    impl = self.cfg.moe_impl

    def product(x, weight, change):
      y = grouped_matmul(x, weight, sizes, layer=layer, impl=impl)
      return y if change is None else y + change(x, sizes, self.row, impl)

    gate, up, down = zip(weights, self.changes)
    x, activation = rows.astype(jnp.float32), gated_activation(self.cfg)  # as inside the fused product
    return product(activation(product(x, *gate), product(x, *up)), *down).astype(rows.dtype)


def rows_per_expert(picks: Int[Array, "R"], experts: int) -> Int[Array, "E"]:
  """Returns how many of the choices [R] fall on each expert, [E] int32; a number past them is none."""
  return jnp.sum(picks[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)


def dispatch(
  place: ExpertMesh,
  experts: OwnExperts,
  z: Float[Array, "M L"],
  ids: Int[Array, "M A"],
  weights: Float[Array, "M A"],
  valid: Bool[Array, "M"],
) -> tuple[Float[Array, "M L"], Int[Array, "E"]]:
  """Sums the chosen experts' outputs over all devices.

  Args:
    place: the devices.
    experts: all experts; `moe_dispatch` of their configuration says how they are reached.
    z: [M, L] what the experts read.
    ids: [M, A] chosen experts.
    weights: [M, A] combine weights.
    valid: [M], false for padding.

  Returns:
    [M, L] float32, and how many rows each of all E experts computed, [E] int32: fewer than chose it only
    where `moe_capacity_factor` makes a device drop some.
  """
  cfg, matrices = experts.cfg, (experts.weights, experts.changes)
  exchanges = cfg.moe_dispatch == "ragged_all_to_all" and place.expert
  if exchanges:
    tokens = place.batch + tuple(axis for axis in place.expert if axis not in place.batch)
  else:
    tokens = tuple(axis for axis in place.batch if axis not in place.expert)
  count, M = math.prod(place.mesh.shape[axis] for axis in tokens), z.shape[0]
  inputs = [_padded(a, -M % count) for a in (z, ids, weights, valid)]

  @functools.partial(
    jax.shard_map,
    mesh=place.mesh,
    in_specs=(*[PartitionSpec(tokens)] * 4, _specs(place, experts), PartitionSpec()),
    out_specs=(PartitionSpec(tokens), PartitionSpec(place.expert)),
  )
  def on_each(z, ids, weights, valid, matrices, row):
    held, changes = matrices
    own = OwnExperts(cfg, held, row, changes)
    run, partial = (_exchanged, place.width) if exchanges else (_local, place.expert + place.width)
    y, counts = run(place, own, z, ids, weights, valid)
    # the devices outside of the group that shares the experts have tokens of their own
    others = tuple(axis for axis in tokens if axis not in place.expert)
    return _sum(y, partial), _sum(counts, others)

  y, counts = on_each(*inputs, matrices, experts.row)
  return y[:M], counts


def _specs(place, experts):
  """Which part of the matrices, and of what is added to them, a device gets: whole experts or their width."""
  lead = (None,) * (experts.weights[0].ndim - 3)
  narrow = PartitionSpec(*lead, place.expert, place.width)
  wide = PartitionSpec(*lead, place.expert, None, place.width)

  def of(change, a_width, b_width):
    if change is None:
      return None
    owner = () if change.shared else (place.expert,)
    a = PartitionSpec(*lead, *owner, None, a_width)
    return ExpertChange(a, PartitionSpec(*lead, place.expert, b_width, None), PartitionSpec())

  gate, up, down = experts.changes
  # below the down matrix each device adds its slice of the width up; the partial sums meet with the others
  changes = of(gate, None, place.width), of(up, None, place.width), of(down, place.width, None)
  return (narrow, narrow, wide), changes


def _padded(a, more):
  """Adds tokens that are not valid, so that each device gets as many."""
  return jnp.pad(a, ((0, more), *[(0, 0)] * (a.ndim - 1))) if more else a


def _sum(y, axes):
  return lax.psum(y, axes) if axes else y


# --- every device sees all tokens ---------------------------------------------------------------------------


def _local(place, experts, z, ids, weights, valid):
  """The part [M, L] of the sum that this device's experts contribute, and the rows of each of them, [E]."""
  E, matrices = experts.count, jax.tree.leaves((experts.weights, experts.changes))
  # by hand: jax 0.12 forgets to add up the gradient of what is read at places that differ between devices
  z, weights = (match_manual_axes(a, z, *matrices) for a in (z, weights))
  first = lax.axis_index(place.expert) * E if place.expert else 0
  mine = valid[:, None] & (ids >= first) & (ids < first + E)
  picks = jnp.where(mine, ids - first, E).reshape(-1)
  sizes = rows_per_expert(picks, E)
  order = jnp.argsort(picks, stable=True)
  A, total = ids.shape[1], picks.shape[0]
  height = min(total, max(_SMALL, 2 * total * E // experts.cfg.num_experts))
  passes = -(-total // height)
  order = jnp.pad(order, (0, passes * height - total))
  weights = weights.reshape(-1)
  end = jnp.cumsum(sizes)

  def add(y, start):
    chosen = lax.dynamic_slice_in_dim(order, start, height)
    upto = jnp.clip(end - start, 0, height)
    out = experts(z[chosen // A], jnp.diff(upto, prepend=0)).astype(jnp.float32)
    return y.at[chosen // A].add(weights[chosen, None] * out)

  y = match_manual_axes(jnp.zeros(z.shape, jnp.float32), z, picks)
  if passes == 1:
    return add(y, 0), sizes

  # twice an even share of the rows fits into one pass; only a skewed routing takes more of them
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def body(y, start):
    return lax.cond(start < end[-1], add, lambda y, _: y, y, start), None

  return lax.scan(body, y, jnp.arange(passes) * height)[0], sizes


# --- every device has its own tokens ------------------------------------------------------------------------


def _exchanged(place, experts, z, ids, weights, valid):
  """The whole sum [M, L] for this device's tokens, and the rows that each of its experts took, [E]."""
  (M, A), E, L = ids.shape, experts.count, z.shape[1]
  N, me = lax.axis_size(place.expert), lax.axis_index(place.expert)
  picks = jnp.where(valid[:, None], ids, N * E).reshape(-1)
  order = jnp.argsort(picks, stable=True)
  wanted = rows_per_expert(picks, N * E)
  wanted = lax.all_gather(wanted, place.expert).reshape(N, N, E)  # sender, receiver, expert
  kept = _within(_room(experts.cfg, N, M, E), wanted)
  there, back = _routes(wanted.sum(-1), kept.sum(-1), me)
  exchange = functools.partial(ragged_all_to_all, axis_name=place.expert)
  zeros = lambda rows: match_manual_axes(jnp.zeros((rows, L), z.dtype), z, kept)
  rows = exchange(z[order // A], zeros(_room(experts.cfg, N, M, E)), *there)
  expert = _expert_of_row(kept[:, me], rows.shape[0])
  by_expert = jnp.argsort(expert, stable=True)
  counts = kept[:, me].sum(0)
  out = experts(rows[by_expert], counts)
  out = exchange(out[jnp.argsort(by_expert)], zeros(M * A), *back)
  out = out[jnp.argsort(order)].reshape(M, A, L).astype(jnp.float32)
  return jnp.sum(weights[..., None] * out, axis=1), counts


def _room(cfg: Config, N: int, M: int, E: int) -> int:
  """R: rows that a device can take. Without a capacity factor, all that could ever be sent to it."""
  A = cfg.num_experts_per_tok
  most = N * M * min(A, E)
  return most if cfg.moe_capacity_factor is None else min(most, math.ceil(cfg.moe_capacity_factor * M * A))


def _within(room: int, wanted: Int[Array, "N N E"]) -> Int[Array, "N N E"]:
  """Cuts the rows [sender, receiver, expert] to what a receiver has room for; the last in its buffer go."""
  receivers = jnp.swapaxes(wanted, 0, 1)
  flat = receivers.reshape(receivers.shape[0], -1)
  before = jnp.cumsum(flat, axis=1) - flat
  kept = jnp.clip(room - before, 0, flat)
  return jnp.swapaxes(kept.reshape(receivers.shape), 0, 1)


def _routes(wanted: Int[Array, "N N"], kept: Int[Array, "N N"], me: Int[Array, ""]):
  """Offsets and sizes of both exchanges, from the rows [sender, receiver] that are wanted and kept.

  A sender's rows lie in the order of the receivers, those that are not kept between them; a receiver's lie in
  the order of the senders.
  """
  source = jnp.cumsum(wanted, axis=1) - wanted
  target = jnp.cumsum(kept, axis=0) - kept
  there = source[me], kept[me], target[me], kept[:, me]
  back = target[:, me], kept[:, me], source[:, me], kept[me]
  return there, back


def _expert_of_row(kept: Int[Array, "N E"], rows: int) -> Int[Array, "R"]:
  """Which expert each received row is for, E where none arrived; rows lie by sender, then by expert."""
  N, E = kept.shape
  owner = jnp.repeat(jnp.tile(jnp.arange(E), N), kept.reshape(-1), total_repeat_length=rows)
  return jnp.where(jnp.arange(rows) < kept.sum(), owner, E)
