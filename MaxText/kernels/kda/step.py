"""Kimi Delta Attention for one token: decode.

Dims: B batch, H heads, K key width, V value width. Source: spec section 2.4 step 6, with both reads of the
memory moved before its update, so that the memory is read once:
    e = exp(log_decay), r = beta (v - (k e)^T S0), out = (q e)^T S0 + (q . k) r, S = e S0 + k r^T.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from MaxText.common.errors import UnsupportedError
from MaxText.kernels.kda.reference import silence


def kda_single_step(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  log_decay: Float32[Array, "B T H K"],
  beta: Float32[Array, "B T H"],
  state: Float32[Array, "B H K V"],
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
  """Advances each row by one token; arguments as `kda`, each [B, 1, ...], state [B, H, K, V].

  Raises:
    UnsupportedError: the call holds another number of tokens than one.
  """
  if q.shape[1] != 1:
    raise UnsupportedError(
      f"kda_impl: step takes one token a call (T == 1), got q of shape {q.shape}; use auto"
    )
  if segment_ids is not None:
    q, k, v, log_decay, beta = silence(segment_ids != 0, q, k, v, log_decay, beta)
  q, k, v, log_decay, beta = (x[:, 0].astype(jnp.float32) for x in (q, k, v, log_decay, beta))
  decay = jnp.exp(log_decay)
  pair = jnp.stack([q * decay, k * decay], axis=2)
  read = jnp.einsum("bhzk,bhkv->bhzv", pair, state, precision=lax.Precision.HIGHEST)
  delta = beta[..., None] * (v - read[:, :, 1])
  out = read[:, :, 0] + jnp.sum(q * k, axis=-1, keepdims=True) * delta
  state = decay[..., None] * state + k[..., None] * delta[:, :, None]
  return out[:, None], state
