"""How a decoder lies on a mesh: shardings of parameters and caches, constraints, and what is replicated.

A `Layout` turns the logical name of a dimension into mesh axes. Nothing is replicated because it does not
fit: a dimension that its axes do not divide is refused, and what the rules leave whole is listed.

Dims: B rows of a batch.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from MaxText.common.errors import ConfigError, InputError
from MaxText.configs.mesh import MESH_AXES, AxisRules, MeshConfig, nearest_divisors, size_key
from MaxText.kernels.mla import PageMesh
from MaxText.kernels.mxfp4 import BLOCK
from MaxText.layers.cache import DecoderCache, KdaCache, LatentPool, LayerCache, MlaCache, MlaPages
from MaxText.layers.expert_dispatch import ExpertMesh

Names = Sequence[str | None]

_CHOOSE_FIRST = ("expert", "expert_mlp", "embed")
_KEYS = {
  "vocab": "vocab_size",
  "embed": "base_emb_dim",
  "heads": "kda_num_heads, base_num_query_heads",
  "q_lora": "q_lora_rank",
  "kv_lora": "kv_lora_rank + qk_rope_head_dim",
  "mlp": "base_mlp_dim, shared_experts * base_moe_mlp_dim",
  "latent": "routed_expert_hidden_size",
  "expert": "num_experts",
  "expert_mlp": "base_moe_mlp_dim",
}
_CACHE_NAMES: dict[type, dict[str, Names]] = {
  KdaCache: {
    "conv": ("activation_batch", None, None, "heads"),
    "state": ("activation_batch", "heads", None, None),
  },
  MlaCache: {"latent": ("cache_batch", None, None), "length": ("cache_batch",)},
  # the ranks of a pool are split; the table of its pages comes from the host, and all devices know it
  MlaPages: {"latent": ("cache_batch", None, None, None), "table": (None, None, None), "length": (None,)},
  LatentPool: {"latent": ("cache_batch", None, None, None)},
}


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh of devices with the rules that lay a model out on it.

  Attributes:
    mesh: has the axes data, fsdp, expert and tensor; others are left alone. An abstract one serves to plan.
    rules: which of them split what.
    name: what messages call it.
  """

  mesh: Mesh | AbstractMesh
  rules: AxisRules
  name: str = "mesh"

  def axes(self, name: str | None) -> tuple[str, ...]:
    """Mesh axes of more than one device that split the dimension `name`; stacked layers are never split.

    Raises:
      AttributeError: no rule has that name.
    """
    wanted = () if name in (None, "layers") else getattr(self.rules, name)
    return tuple(axis for axis in wanted if self.mesh.shape[axis] > 1)

  def spec(self, names: Names) -> PartitionSpec:
    """Partition of an array from its dimensions' names; a mesh axis goes to one dimension only."""
    taken: set[str] = set()
    parts: list[tuple[str, ...]] = [()] * len(names)
    for i in sorted(range(len(names)), key=lambda i: names[i] not in _CHOOSE_FIRST):
      parts[i] = tuple(axis for axis in self.axes(names[i]) if axis not in taken)
      taken.update(parts[i])
    return PartitionSpec(*(part if len(part) > 1 else part[0] if part else None for part in parts))

  def sharding(self, names: Names) -> NamedSharding:
    """The spec of `names` on this mesh."""
    return NamedSharding(self.mesh, self.spec(names))

  def shards(self, names: Names) -> list[int]:
    """Parts that each dimension is cut into."""
    return [self._count((part,) if isinstance(part, str) else part or ()) for part in self.spec(names)]

  def parts(self, name: str) -> int:
    """Parts that a dimension is cut into where it is the only one of an array."""
    return self._count(self.axes(name))

  def _count(self, axes: Sequence[str]) -> int:
    return math.prod(self.mesh.shape[axis] for axis in axes)

  @property
  def row_multiple(self) -> int:
    """Rows that a batch has to be a multiple of."""
    return math.lcm(self.parts("activation_batch"), self.parts("cache_batch"))

  @property
  def pages(self) -> PageMesh:
    """The devices that hold the ranks of a pool of latents."""
    return PageMesh(self.mesh, self.axes("cache_batch"))

  @property
  def experts(self) -> ExpertMesh:
    """What the dispatch of the experts has to know."""
    return ExpertMesh(self.mesh, self.axes("activation_batch"), self.axes("expert"), self.axes("expert_mlp"))

  def constrain(self, x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Fixes the layout of an activation of any shape.

    Raises:
      InputError: the batch does not divide over the devices.
    """
    for name, size, parts in zip(names, x.shape, self.shards(names)):
      if size % parts:
        raise InputError(
          f"{self.name}: {size} rows ({name}) do not divide over {parts} devices; "
          f"nearest: {' or '.join(map(str, nearest_multiples(size, parts)))} rows"
        )
    return jax.lax.with_sharding_constraint(x, self.sharding(names))


def find_devices(cfg: MeshConfig, slices: int = 1) -> list[jax.Device]:
  """Returns this machine's devices that make up the mesh of `cfg`, or one such mesh for each of `slices`.

  Raises:
    InputError: there are fewer.
    ConfigError: an axis is to take what the others leave, and they do not divide the devices.
  """
  found = jax.devices()
  cfg = cfg.filled(max(len(found) // slices, 1))
  needed = cfg.devices * slices
  if len(found) < needed:
    sizes = " x ".join(f"{axis} {size}" for axis, size in cfg.sizes.items())
    hint = f"; simulate them with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    raise InputError(
      f"mesh {cfg.mesh_name}: needs {needed} devices ({sizes}), found {len(found)} of kind "
      f"{found[0].device_kind}{hint if found[0].platform == 'cpu' else ''}"
    )
  return found[:needed]


def build_layout(cfg: MeshConfig) -> Layout:
  """Arranges this machine's devices in the mesh of `cfg`; raises as `find_devices`."""
  devices = find_devices(cfg)
  mesh = jax.make_mesh(
    tuple(cfg.filled(len(devices)).sizes.values()),
    MESH_AXES,
    axis_types=(AxisType.Auto,) * len(MESH_AXES),
    devices=devices,
  )
  return Layout(mesh, cfg.logical_axis_rules, f"mesh {cfg.mesh_name}")


# --- parameters ---------------------------------------------------------------------------------------------


class Dimensions(NamedTuple):
  """A parameter: its dotted path, shape, bytes, and the logical name of each dimension."""

  path: str
  shape: tuple[int, ...]
  nbytes: int
  names: tuple[str | None, ...]


def parameters(decoder: nnx.Module) -> Iterator[Dimensions]:
  """Yields what a decoder holds, abstract or not."""
  for keys, variable in nnx.to_flat_state(nnx.state(decoder)):
    value = variable.get_value()
    nbytes = math.prod(value.shape) * value.dtype.itemsize
    yield Dimensions(".".join(map(str, keys)), value.shape, nbytes, variable.get_metadata("axes"))


def parameter_shardings(layout: Layout, decoder: nnx.Module) -> dict[str, NamedSharding]:
  """Returns dotted path -> sharding of every parameter of a decoder, abstract or not.

  Raises:
    ConfigError: a dimension does not divide over its devices, or the rules would cut experts, or blocks of
      MXFP4 that their weights are rounded to, across.
  """
  found = list(parameters(decoder))
  _check_divisible(layout, found)
  _check_blocks(layout, decoder)
  for param in found:
    # inside the experts only whole experts and slices of their width have a meaning of their own
    spec = layout.spec(param.names)
    across = {"latent", "embed"} & set(param.names) if "expert_mlp" in param.names else ()
    for name in across:
      if (axes := spec[param.names.index(name)]) is not None:
        raise ConfigError(
          f"{layout.name}: logical_axis_rules: {name} would cut the experts across over {axes} "
          f"({param.path}); name that axis in expert or expert_mlp too"
        )
  return {param.path: layout.sharding(param.names) for param in found}


def place[Decoder: nnx.Module](decoder: Decoder, layout: Layout | None) -> Decoder:
  """Returns a decoder of the same weights, laid out over the devices and knowing it."""
  if layout is None:
    return decoder
  shardings = parameter_shardings(layout, decoder)
  graph, state = nnx.split(decoder)
  flat = [
    (keys, variable.replace(jax.device_put(variable.get_value(), shardings[".".join(map(str, keys))])))
    for keys, variable in nnx.to_flat_state(state)
  ]
  placed = nnx.merge(graph, nnx.from_flat_state(flat))
  placed.layout = layout
  return placed


def _check_divisible(layout: Layout, found: Sequence[Dimensions]) -> None:
  """Refuses the smallest dimension that does not divide: heads, rather than their channels."""
  wrong = [
    (size, parts, name, param)
    for param in found
    for size, parts, name in zip(param.shape, layout.shards(param.names), param.names)
    if size % parts
  ]
  if not wrong:
    return
  size, parts, name, param = min(wrong, key=lambda each: each[0])
  raise _indivisible(layout, name, size, parts, f"({param.path} {list(param.shape)})")


def _check_blocks(layout: Layout, decoder: nnx.Module) -> None:
  """Refuses to cut plain experts within a block that is rounded together."""
  cfg, parts = decoder.cfg, layout.parts("expert_mlp")
  width = cfg.base_moe_mlp_dim
  if not cfg.mxfp4_qat or cfg.packs_experts or parts == 1 or width % (parts * BLOCK) == 0:
    return
  detail = f"in whole blocks of {BLOCK}"
  raise _indivisible(layout, "expert_mlp", width, parts, detail, cause="mxfp4_qat: ", block=BLOCK)


def _indivisible(
  layout: Layout, name: str, size: int, parts: int, detail: str, *, cause: str = "", block: int = 1
) -> ConfigError:
  """The refusal of a dimension that does not divide in whole blocks, with the nearest sizes that do."""
  keys = ", ".join(f"{size_key(axis)}={layout.mesh.shape[axis]}" for axis in layout.axes(name))
  fitting = " or ".join(map(str, dict.fromkeys(nearest_divisors(size // block, parts))))
  multiples = " or ".join(map(str, nearest_multiples(size, parts * block)))
  return ConfigError(
    f"{layout.name}: {keys}: {cause}{name} of {size} ({_KEYS.get(name, name)}) does not divide over {parts} "
    f"devices {detail}; nearest that do: {fitting} devices, or a size of {multiples}"
  )


def nearest_multiples(size: int, parts: int) -> list[int]:
  """Returns the positive multiples of `parts` next to `size` on either side."""
  below = size // parts * parts
  return [n for n in (below, below + parts) if n]


class Replicated(NamedTuple):
  """A parameter of which several devices hold the same part.

  Attributes:
    path: its dotted path.
    shape: its whole shape.
    copies: devices that hold each part.
    extra_bytes: bytes over all devices beyond one copy.
  """

  path: str
  shape: tuple[int, ...]
  copies: int
  extra_bytes: int


def replication_report(layout: Layout, decoder: nnx.Module) -> list[Replicated]:
  """Lists every parameter that is held more than once, the costliest first."""
  rows = []
  for param in parameters(decoder):
    copies = layout.mesh.size // math.prod(layout.shards(param.names))
    if copies > 1:
      rows.append(Replicated(param.path, param.shape, copies, (copies - 1) * param.nbytes))
  return sorted(rows, key=lambda row: -row.extra_bytes)


def describe_layout(layout: Layout, decoder: nnx.Module) -> str:
  """Says in one line how large the mesh is, what a device holds, and what is replicated."""
  report = replication_report(layout, decoder)
  total = sum(param.nbytes for param in parameters(decoder))
  extra = sum(row.extra_bytes for row in report)
  sizes = " x ".join(f"{axis} {n}" for axis, n in layout.mesh.shape.items() if n > 1) or "one device"
  line = f"{layout.name}: {sizes}; {_mib((total + extra) // layout.mesh.size)} of weights a device"
  if not report:
    return f"{line}; nothing is replicated"
  worst = ", ".join(f"{row.path} x {row.copies}" for row in itertools.islice(report, 3))
  return f"{line}; replicated: {len(report)} parameters, {_mib(extra)} of copies (most: {worst})"


def _mib(nbytes: int) -> str:
  return f"{nbytes / 2**20:,.2f} MiB"


# --- caches -------------------------------------------------------------------------------------------------


def cache_shardings[Memory](layout: Layout, memory: Memory) -> Memory:
  """Returns the sharding of each leaf of caches, own or stacked: rows, ranks of pages, and heads if any."""

  def of(layer: LayerCache | LatentPool) -> LayerCache | LatentPool:
    leaves = {field: (getattr(layer, field), names) for field, names in _CACHE_NAMES[type(layer)].items()}
    shardings = {
      field: layout.sharding((None,) * (leaf.ndim - len(names)) + names)
      for field, (leaf, names) in leaves.items()
    }
    return dataclasses.replace(layer, **shardings)

  return jax.tree.map(of, memory, is_leaf=lambda node: type(node) in _CACHE_NAMES)


def constrain_cache[Memory](layout: Layout | None, memory: Memory) -> Memory:
  """Fixes the layout of every leaf of caches, inside a compiled program."""
  if layout is None:
    return memory
  return jax.lax.with_sharding_constraint(memory, cache_shardings(layout, memory))


def settle(layout: Layout | None, state: Any) -> Any:
  """Fixes the layout of what a compiled program hands to the next: caches by rows, all else whole everywhere.

  Without it the compiler would choose, and the next program would be compiled for another layout.
  """
  if layout is None:
    return state
  is_cache = lambda node: isinstance(node, DecoderCache)
  fix = lambda node: (
    constrain_cache(layout, node) if is_cache(node) else layout.constrain(node, *[None] * node.ndim)
  )
  return jax.tree.map(fix, state, is_leaf=is_cache)
