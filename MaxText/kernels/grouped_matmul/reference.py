"""Definition of the grouped products: every row meets every expert, then keeps its own.

Dims: M rows, E experts, L expert input width, F expert width, N output and K input channels of one weight.
Source: spec 2.7 step 4.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText.kernels.grouped_matmul.operands import Activation, Weight
from MaxText.kernels.mxfp4 import MxFp4, unpack


def _layer_weight(w, layer):
  """The float32 weights [E, N, K] of one layer."""
  w = unpack(w, jnp.float32) if isinstance(w, MxFp4) else w
  return (w if layer is None else w[layer]).astype(jnp.float32)


def _product(x, w):
  return jnp.einsum("emk,enk->emn", x, w, precision=jax.lax.Precision.HIGHEST)


def _own_expert(y, group_sizes):
  """From y [E, M, N] takes for each row the product with its own expert, or 0 past the last group."""
  end = jnp.cumsum(group_sizes)[:, None]
  row = jnp.arange(y.shape[1])
  own = (row >= end - group_sizes[:, None]) & (row < end)
  return jnp.where(own[..., None], y, 0).sum(axis=0)


def grouped_matmul(
  x: Float[Array, "M K"], w: Weight, group_sizes: Int[Array, " E"], layer: Int[Array, ""] | None = None
) -> Float[Array, "M N"]:
  """Multiplies every row by every expert; arguments as the operation of that name in this package."""
  w = _layer_weight(w, layer)
  y = _product(jnp.broadcast_to(x.astype(jnp.float32), (w.shape[0], *x.shape)), w)
  return _own_expert(y, group_sizes).astype(x.dtype)


def grouped_mlp(
  x: Float[Array, "M L"],
  w1: Weight,
  w3: Weight,
  w2: Weight,
  group_sizes: Int[Array, " E"],
  activation: Activation,
  layer: Int[Array, ""] | None = None,
) -> Float[Array, "M L"]:
  """Applies every expert to every row; arguments as the operation of that name in this package."""
  w1, w3, w2 = (_layer_weight(w, layer) for w in (w1, w3, w2))
  rows = jnp.broadcast_to(x.astype(jnp.float32), (w1.shape[0], *x.shape))
  y = _product(activation(_product(rows, w1), _product(rows, w3)), w2)
  return _own_expert(y, group_sizes).astype(x.dtype)
