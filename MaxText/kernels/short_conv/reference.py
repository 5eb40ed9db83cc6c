"""Definition of the short convolution: one token at a time over a sliding window.

Dims: B batch, T new tokens, W convolution width, C channels. Source: spec section 2.4 step 2.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from MaxText.kernels.carries import match_manual_axes
from MaxText.kernels.segments import document_order


def short_conv_reference(
  x: Float[Array, "B T *C"],
  weight: Float32[Array, "*C W"],
  window: Float[Array, "B W-1 *C"],
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T *C"], Float[Array, "B W-1 *C"]]:
  """Scans the tokens; arguments as `short_conv`: x [B, T, *C], weight [*C, W], window [B, W-1, *C]."""
  taps = jnp.moveaxis(weight, -1, 0).astype(jnp.float32)
  if segment_ids is None:
    valid, starts = jnp.ones(x.shape[:2], bool), jnp.zeros(x.shape[:2], bool)
  else:
    order, valid = document_order(segment_ids)
    starts = jnp.diff(order, axis=1, prepend=0) > 0

  def per_row(flag):
    return flag.reshape(-1, *(1,) * (x.ndim - 1))

  def body(window, token):
    x, valid, starts = token
    window = jnp.where(per_row(starts), 0, window)
    full = jnp.concatenate([window, x[:, None].astype(window.dtype)], axis=1)
    y = jax.nn.silu(jnp.sum(full * taps, axis=1))
    return jnp.where(per_row(valid), full[:, 1:], window), jnp.where(per_row(valid)[:, 0], y, 0)

  carry = match_manual_axes(window.astype(jnp.float32), x, weight)
  last, y = lax.scan(body, carry, (jnp.moveaxis(x, 1, 0), valid.T, starts.T))
  return jnp.moveaxis(y, 0, 1).astype(x.dtype), last.astype(window.dtype)
