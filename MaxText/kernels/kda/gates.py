"""The two decay gates of Kimi Delta Attention, in float32 whatever the model's dtype.

Dims: B batch, T new tokens, H heads, K key width. Source: spec section 2.4 step 4 and section 8.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def log_decay_bounded(
  z: Float[Array, "B T H K"],
  A_log: Float[Array, "H"],
  dt_bias: Float[Array, "H K"],
  lower_bound: float,
) -> Float32[Array, "B T H K"]:
  """Maps gate projections to log decays in (lower_bound, 0): the gate of Kimi K3.

  Args:
    z: [B, T, H, K] raw gate projection.
    A_log: [H] log of the gate's slope, which multiplies `z + dt_bias`.
    dt_bias: [H, K] offset of each channel.
    lower_bound: strongest log decay of one token, natural log, < 0.

  Returns:
    log decay [B, T, H, K] float32.
  """
  return lower_bound * jax.nn.sigmoid(_slope(A_log) * _shifted(z, dt_bias))


def log_decay_softplus(
  z: Float[Array, "B T H K"],
  A_log: Float[Array, "H"],
  dt_bias: Float[Array, "H K"],
) -> Float32[Array, "B T H K"]:
  """Maps gate projections to log decays without a lower bound: the gate of Kimi-Linear.

  Args:
    z: [B, T, H, K] raw gate projection.
    A_log: [H] log of the decay rate.
    dt_bias: [H, K] offset of each channel.

  Returns:
    log decay [B, T, H, K] float32, <= 0.
  """
  return -_slope(A_log) * jax.nn.softplus(_shifted(z, dt_bias))


def _slope(A_log):
  return jnp.exp(A_log.astype(jnp.float32))[:, None]


def _shifted(z, dt_bias):
  return z.astype(jnp.float32) + dt_bias.astype(jnp.float32)
