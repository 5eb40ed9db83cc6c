"""Definition of Kimi Delta Attention: one token at a time.

Dims: B batch, T new tokens, H heads, K key width, V value width. Source: spec section 2.4 step 6.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from MaxText.kernels.carries import match_manual_axes
from MaxText.kernels.segments import document_order

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def kda_step(
  q: Float32[Array, "B H K"],
  k: Float32[Array, "B H K"],
  v: Float32[Array, "B H V"],
  log_decay: Float32[Array, "B H K"],
  beta: Float32[Array, "B H"],
  state: Float32[Array, "B H K V"],
) -> tuple[Float32[Array, "B H V"], Float32[Array, "B H K V"]]:
  """Decays the memory, writes the delta of one token, and reads it.

  Args:
    q: [B, H, K] query, normalised and scaled.
    k: [B, H, K] key, normalised.
    v: [B, H, V] value.
    log_decay: [B, H, K] natural log of the decay, <= 0.
    beta: [B, H] write strength.
    state: [B, H, K, V] memory before the token.

  Returns:
    output [B, H, V] and the memory [B, H, K, V] after the token.
  """
  state = state * jnp.exp(log_decay)[..., None]
  delta = beta[..., None] * (v - _einsum("bhk,bhkv->bhv", k, state))
  state = state + _einsum("bhk,bhv->bhkv", k, delta)
  return _einsum("bhk,bhkv->bhv", q, state), state


def kda_reference(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  log_decay: Float32[Array, "B T H K"],
  beta: Float32[Array, "B T H"],
  state: Float32[Array, "B H K V"],
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
  """Scans `kda_step` over the tokens; arguments as `kda`, each [B, T, ...], state [B, H, K, V]."""

  def body(state, token):
    (*inputs, starts) = token
    state = jnp.where(starts[:, None, None, None], 0, state)
    out, state = kda_step(*inputs, state)
    return state, out

  if segment_ids is None:
    starts = jnp.zeros(beta.shape[:2], bool)
  else:
    order, valid = document_order(segment_ids)
    starts = jnp.diff(order, axis=1, prepend=0) > 0
    q, k, v, log_decay, beta = silence(valid, q, k, v, log_decay, beta)
  tokens = tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, log_decay, beta))
  state = match_manual_axes(state, q, k, v, log_decay, beta)
  state, out = lax.scan(body, state, (*tokens, starts.T))
  return jnp.moveaxis(out, 0, 1), state


def silence(valid: Bool[Array, "B T"], *tokens: Float[Array, "B T ..."]) -> tuple[Array, ...]:
  """Zeroes padded tokens: with no key, no write and a log decay of 0 they leave the memory as it is.

  Args:
    valid: [B, T] tokens that are not padding.
    *tokens: [B, T, ...] inputs of `kda`.

  Returns:
    the same arrays, zero at padding.
  """
  return tuple(jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0) for x in tokens)
