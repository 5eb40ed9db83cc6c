"""Matrix products in which each row has its own expert, rows sorted by expert.

Dims: M rows, E experts, L expert input width, F expert width, N output and K input channels of one weight.
Source: spec 2.7 step 4; weights keep the published orientation [out, in].
"""

import functools
from typing import Literal

from jaxtyping import Array, Float, Int

from MaxText.common import choices
from MaxText.common.errors import UnsupportedError
from MaxText.kernels.grouped_matmul import blocked, reference
from MaxText.kernels.grouped_matmul.on_grid import grouped_mlp_on_grid
from MaxText.kernels.grouped_matmul.operands import Activation, Weight
from MaxText.kernels.mxfp4 import MxFp4

type Impl = Literal["auto", "reference", "blocked"]

_IMPLEMENTATIONS = {"reference": reference, "blocked": blocked}


def grouped_matmul(
  x: Float[Array, "M K"],
  w: Weight,
  group_sizes: Int[Array, " E"],
  *,
  layer: Int[Array, ""] | None = None,
  impl: Impl = "auto",
) -> Float[Array, "M N"]:
  """Multiplies each row by the transposed weight of its expert.

  Differentiable in `x` and in an unpacked `w`. A weight of an expert without rows is never read. A scan that
  trains passes the layer's own weights: the gradient of a stack has the size of the whole stack.

  Args:
    x: [M, K] rows, those of expert 0 first.
    w: [E, N, K], or [S, E, N, K] with `layer`; bytes are unpacked one expert at a time.
    group_sizes: [E] rows of each expert; their sum is at most M.
    layer: position in the leading axis of a stacked `w`, int32; the stack is indexed, never sliced whole.
    impl: "blocked" visits the experts that have rows, "reference" multiplies every row by every expert.

  Returns:
    [M, N] in x.dtype, accumulated in float32; rows past sum(group_sizes) are 0.
  """
  return _implementation("grouped_matmul", impl).grouped_matmul(x, w, group_sizes, layer)


def grouped_mlp(
  x: Float[Array, "M L"],
  w1: Weight,
  w3: Weight,
  w2: Weight,
  group_sizes: Int[Array, " E"],
  activation: Activation,
  *,
  layer: Int[Array, ""] | None = None,
  on_grid: bool = False,
  impl: Impl = "auto",
) -> Float[Array, "M L"]:
  """Applies to each row the gated MLP of its expert: activation(x w1', x w3') w2'.

  One pass over the experts that have rows: no array of all hidden activations exists, forward or backward.
  For the rest see `grouped_matmul`.

  Args:
    x: [M, L] rows, those of expert 0 first.
    w1: [E, F, L] gate weights, or [S, E, F, L] with `layer`.
    w3: as w1, up weights.
    w2: [E, L, F] down weights, or [S, E, L, F] with `layer`.
    group_sizes: [E] rows of each expert; their sum is at most M.
    activation: (gate, up) -> hidden, elementwise on float32; it must not close over traced arrays.
    layer: position in the leading axis of stacked weights, int32.
    on_grid: round unpacked weights to MXFP4 as `pack` does, with a straight-through gradient; they have no
      stack axis then. The result has the bits that their bytes would give.
    impl: as `grouped_matmul`.

  Returns:
    [M, L] in x.dtype, accumulated in float32; rows past sum(group_sizes) are 0.
  """
  run = _implementation("grouped_mlp", impl).grouped_mlp
  if not on_grid:
    return run(x, w1, w3, w2, group_sizes, activation, layer)
  if layer is not None or isinstance(w1, MxFp4):
    raise NotImplementedError(f"grouped_mlp on_grid takes the plain weights of one layer, got {w1.shape}")
  return grouped_mlp_on_grid(functools.partial(_one_layer, run, activation), x, w1, w3, w2, group_sizes)


def _one_layer(run, activation, x, w1, w3, w2, group_sizes):
  return run(x, w1, w3, w2, group_sizes, activation, None)


def _implementation(op: str, impl: Impl):
  name = "blocked" if impl == "auto" else impl
  if name not in _IMPLEMENTATIONS:
    raise UnsupportedError(f"{op}: no implementation {name!r}, there are {', '.join(_IMPLEMENTATIONS)}")
  choices.record(op, name)
  return _IMPLEMENTATIONS[name]
