"""A mesh of devices: how many stand along each axis, and which axes split which dimension of what.

A file below configs/meshes/ states every field; `configs.loader` reads it. A dimension has a logical name,
which parameters carry as `axes`; the rules map it to mesh axes, of which the first counts slowest.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from MaxText.common.errors import ConfigError

Axis = Literal["data", "fsdp", "expert", "tensor"]
MESH_AXES: tuple[Axis, ...] = ("data", "fsdp", "expert", "tensor")
Axes = tuple[Axis, ...]


class _Frozen(BaseModel):
  model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AxisRules(_Frozen):
  """Mesh axes that split each named dimension; an empty list keeps it whole, on purpose.

  A mesh axis splits one dimension of an array only: `expert`, `expert_mlp` and `embed` choose first, then the
  others from left to right. An axis that another dimension has taken is passed over.
  """

  # --- dimensions of parameters -----------------------------------------------------------------------------
  vocab: Axes
  embed: Axes
  norm: Axes
  heads: Axes
  head_dim: Axes
  q_lora: Axes
  kv_lora: Axes
  mlp: Axes
  latent: Axes
  expert: Axes
  expert_mlp: Axes

  # --- dimensions of activations and caches -----------------------------------------------------------------
  activation_batch: Axes
  cache_batch: Axes

  @model_validator(mode="after")
  def _check(self) -> "AxisRules":
    for name, problem in self._problems():
      raise ValueError(f"{name}: {problem}")
    return self

  def _problems(self) -> Iterator[tuple[str, str]]:
    for name in AxisRules.model_fields:
      axes = getattr(self, name)
      if len(set(axes)) < len(axes):
        yield name, f"names a mesh axis twice: {', '.join(axes)}"
    for other in ("expert", "activation_batch"):
      # partial sums over an expert's width are added up over its axes, so all of them need the same tokens
      if shared := sorted(set(self.expert_mlp) & set(getattr(self, other))):
        yield "expert_mlp", f"{', '.join(shared)} also splits {other}; an axis can do only one of the two"


class MeshConfig(_Frozen):
  """Sizes and rules of a mesh; each size may be overridden by its key on the command line.

  One size may be -1: that axis takes the devices which the others leave.
  """

  mesh_name: str
  ici_data_parallelism: int = Field(ge=-1)
  ici_fsdp_parallelism: int = Field(ge=-1)
  ici_expert_parallelism: int = Field(ge=-1)
  ici_tensor_parallelism: int = Field(ge=-1)
  logical_axis_rules: AxisRules

  @model_validator(mode="after")
  def _check(self) -> "MeshConfig":
    for key, problem in size_problems({size_key(axis): size for axis, size in self.sizes.items()}):
      raise ValueError(f"{key}: {problem}")
    return self

  @property
  def sizes(self) -> dict[str, int]:
    """Devices along each mesh axis, -1 for those that the others leave."""
    return {axis: getattr(self, size_key(axis)) for axis in MESH_AXES}

  @property
  def devices(self) -> int | None:
    """Devices of the whole mesh, None where one axis takes what there is."""
    return None if -1 in self.sizes.values() else math.prod(self.sizes.values())

  def filled(self, devices: int) -> "MeshConfig":
    """Returns the mesh in which the axis of size -1 has its share of `devices`.

    Raises:
      ConfigError: the other sizes do not divide the devices.
    """
    open_axes = [axis for axis, size in self.sizes.items() if size == -1]
    if not open_axes:
      return self
    fixed = {axis: size for axis, size in self.sizes.items() if size != -1}
    if devices % math.prod(fixed.values()):
      sizes = ", ".join(f"{size_key(axis)}={size}" for axis, size in fixed.items() if size > 1)
      below, above = nearest_divisors(devices, math.prod(fixed.values()))
      raise ConfigError(
        f"mesh {self.mesh_name}: {sizes} does not divide {devices} devices; nearest products that do: "
        f"{' or '.join(map(str, dict.fromkeys((below, above))))}"
      )
    return self.model_copy(update={size_key(open_axes[0]): devices // math.prod(fixed.values())})


def size_problems(sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
  """Yields (key, what is wrong with it) of sizes by key."""
  for key, size in sizes.items():
    if size == 0:
      yield key, "0 devices are no mesh; -1 takes those that the other sizes leave"
  if len(rest := [key for key, size in sizes.items() if size == -1]) > 1:
    yield rest[1], f"only one size can be -1, and {rest[0]} is"


def nearest_divisors(size: int, parts: int) -> tuple[int, int]:
  """Returns the divisors of `size` next to `parts`, which is none, on either side."""
  divisors = [d for d in range(1, size + 1) if size % d == 0]
  return max(d for d in divisors if d < parts), min((d for d in divisors if d > parts), default=size)


def size_key(axis: str) -> str:
  """Returns the key that sets the size of a mesh axis."""
  return f"ici_{axis}_parallelism"
