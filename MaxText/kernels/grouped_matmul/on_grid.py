"""Training of experts that will be stored as MXFP4: packed bytes forward, gradients past them.

The weights are packed as for a checkpoint and the packed product runs, so that a forward pass in training has
the bits of one from the exported file. The gradient takes the rounding for the identity, whatever it moved
or cut off (a straight-through estimate), at the values on the grid.

Dims: M rows, E experts, L expert input width, F expert width. Source: spec 2.10, 3.1.
"""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from MaxText.kernels.mxfp4 import pack, unpack

GroupedMlp = Callable[..., Float[Array, "M L"]]
"""(rows, w1, w3, w2, group sizes) -> rows, `grouped_mlp` with its activation and implementation chosen."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_mlp_on_grid(
  mlp: GroupedMlp,
  x: Float[Array, "M L"],
  w1: Float[Array, "E F L"],
  w3: Float[Array, "E F L"],
  w2: Float[Array, "E L F"],
  group_sizes: Int[Array, " E"],
) -> Float[Array, "M L"]:
  """Applies to each row its expert's gated MLP with weights rounded to MXFP4.

  Args:
    mlp: the operation that takes the packed weights; it must not close over traced arrays.
    x: [M, L] rows, those of expert 0 first.
    w1: [E, F, L] gate weights, L a multiple of 32.
    w3: [E, F, L] up weights.
    w2: [E, L, F] down weights, F a multiple of 32.
    group_sizes: [E] rows of each expert.

  Returns:
    [M, L] in x.dtype.
  """
  return mlp(x, pack(w1), pack(w3), pack(w2), group_sizes)


def _forward(mlp, x, w1, w3, w2, group_sizes):
  packed = pack(w1), pack(w3), pack(w2)
  # an empty slice says which dtype the gradients have; the bytes are what is kept
  return mlp(x, *packed, group_sizes), (x, packed, group_sizes, w1[:0])


def _backward(mlp, residuals, cotangent):
  x, packed, group_sizes, like = residuals
  weights = [unpack(w, like.dtype) for w in packed]
  _, pullback = jax.vjp(lambda x, *weights: mlp(x, *weights, group_sizes), x, *weights)
  return *pullback(cotangent), None


grouped_mlp_on_grid.defvjp(_forward, _backward)
