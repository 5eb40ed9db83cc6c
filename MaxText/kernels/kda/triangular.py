"""Inverse of a unit lower triangular matrix, by forward substitution in nested blocks.

Repeated doubling (the Neumann product) loses all digits for correlated keys and slow decay; substitution does
not. Source: spec section 2.4, "chunkwise form".
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from MaxText.kernels.carries import match_manual_axes

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_lower_inverse(strict: Float32[Array, "... L L"], block: int) -> Float32[Array, "... L L"]:
  """Inverts I + strict.

  Args:
    strict: [..., L, L] strictly lower triangular matrices.
    block: size of the blocks on the diagonal that are inverted row by row; divides L.

  Returns:
    inverse [..., L, L], unit lower triangular.
  """
  L = strict.shape[-1]
  starts = range(0, L, block)
  diagonal = jnp.stack([strict[..., a : a + block, a : a + block] for a in starts], axis=-3)
  corners = _substituted_rows(diagonal)
  inverse = _with_columns(corners[..., 0, :, :], 0, L)
  for index, a in enumerate(starts[1:], start=1):
    corner = corners[..., index, :, :]
    above = _matmul(strict[..., a : a + block, :a], inverse)
    inverse = jnp.concatenate([inverse, _with_columns(corner, a, L) - _matmul(corner, above)], axis=-2)
  return inverse


def _substituted_rows(strict):
  """Inverts I + strict one row after the other."""
  L = strict.shape[-1]
  identity = match_manual_axes(jnp.eye(L, dtype=strict.dtype), strict)

  def body(i, inverse):
    row = lax.dynamic_index_in_dim(strict, i, axis=-2, keepdims=False)
    solved = identity[i] - jnp.sum(row[..., :, None] * inverse, axis=-2)
    return lax.dynamic_update_index_in_dim(inverse, solved, i, axis=-2)

  return lax.fori_loop(1, L, body, jnp.broadcast_to(identity, strict.shape))


def _with_columns(corner, start, width):
  """Places a square corner at column `start` of a zero row block of the given width."""
  size = corner.shape[-1]
  return jnp.pad(corner, [(0, 0)] * (corner.ndim - 1) + [(start, width - start - size)])


def _forward(strict, block):
  inverse = unit_lower_inverse(strict, block)
  return inverse, inverse


def _backward(block, inverse, cotangent):
  transposed = jnp.swapaxes(inverse, -1, -2)
  return (-_matmul(transposed, _matmul(cotangent, transposed)),)


unit_lower_inverse.defvjp(_forward, _backward)
