"""Root-mean-square and L2 normalisation, both computed in float32 whatever comes in.

Source: spec 2.1 (RMSNorm), 2.4 step 3 (L2) and the eps table of spec 2.0.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from MaxText.common import params


class RMSNorm(nnx.Module):
  """Divides by the root mean square of the last axis and scales each channel."""

  def __init__(self, width: int, eps: float, dtype: str, *, rngs: nnx.Rngs, axis: str = "norm"):
    self.eps = eps
    self.scale = params.param(rngs, (width,), (axis,), dtype, params.ones)

  def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Normalises x [..., D]; the result is rounded to x.dtype before the weight multiplies it (spec 9-D2)."""
    return (unit_rms(x, self.eps).astype(x.dtype) * self.scale[...].astype(x.dtype)).astype(x.dtype)


def unit_rms(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
  """Returns x [..., D] divided by sqrt(mean(x^2) + eps), in float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def unit_l2(x: Float[Array, "*B K"], eps: float = 1e-6) -> Float[Array, "*B K"]:
  """Returns x [..., K] divided by sqrt(sum(x^2) + eps), in float32: eps joins the sum, not the mean."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)
