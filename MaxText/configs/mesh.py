"""A mesh of devices: how many stand along each axis, and which axes split which dimension of what.

A file below configs/meshes/ states every field; `configs.loader` reads it. A dimension has a logical name,
which parameters carry as `axes`; the rules map it to mesh axes, of which the first counts slowest.
"""

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
  """Sizes and rules of a mesh; each size may be overridden by its key on the command line."""

  mesh_name: str
  ici_data_parallelism: int = Field(gt=0)
  ici_fsdp_parallelism: int = Field(gt=0)
  ici_expert_parallelism: int = Field(gt=0)
  ici_tensor_parallelism: int = Field(gt=0)
  logical_axis_rules: AxisRules

  @property
  def sizes(self) -> dict[str, int]:
    """Devices along each mesh axis."""
    return {axis: getattr(self, size_key(axis)) for axis in MESH_AXES}

  @property
  def devices(self) -> int:
    """Devices of the whole mesh."""
    return math.prod(self.sizes.values())


def size_key(axis: str) -> str:
  """Returns the key that sets the size of a mesh axis."""
  return f"ici_{axis}_parallelism"
