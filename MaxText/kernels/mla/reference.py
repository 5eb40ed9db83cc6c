"""Definition of multi-head latent attention: all keys, values and scores at once, in float32.

Dims: B batch, T new tokens, S cache slots, H heads, N nope width, P tail width, R latent rank, V value width.
Source: spec section 2.5.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from MaxText.kernels.mla.pages import Rows, capacity, read_rows
from MaxText.kernels.segments import document_order

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def mla_reference(
  q_nope: Float[Array, "B T H N"],
  q_tail: Float[Array, "B T H P"],
  latent: Float[Array, "B T RP"],
  w_uk: Float[Array, "H N R"],
  w_uv: Float[Array, "H V R"],
  *,
  prefix: tuple[Rows, Int[Array, "B"]] | None,
  segment_ids: Int[Array, "B T"] | None,
  scale: float,
) -> Float[Array, "B T H V"]:
  """Materialises the attention; arguments as `mla`."""
  B, T, R = *latent.shape[:2], w_uk.shape[-1]
  dtype = q_nope.dtype
  order, valid = jnp.zeros((B, T), jnp.int32), jnp.ones((B, T), bool)
  if segment_ids is not None:
    order, valid = document_order(segment_ids)
  causal = jnp.tril(jnp.ones((T, T), bool))
  seen = causal & (order[:, :, None] == order[:, None, :]) & valid[:, None, :]
  if prefix is not None:
    rows, length = prefix
    rows = read_rows(rows, 0, capacity(rows), length)
    latent = jnp.concatenate([rows, latent], axis=1)
    before = (jnp.arange(rows.shape[1]) < length[:, None])[:, None] & (order == 0)[:, :, None]
    seen = jnp.concatenate([before, seen], axis=-1)
  seen = (seen & valid[:, :, None])[:, None]
  q_nope, q_tail, latent, w_uk, w_uv = (x.astype(jnp.float32) for x in (q_nope, q_tail, latent, w_uk, w_uv))
  keys = _einsum("bjr,hnr->bjhn", latent[..., :R], w_uk)
  values = _einsum("bjr,hvr->bjhv", latent[..., :R], w_uv)
  scores = _einsum("bthn,bjhn->bhtj", q_nope, keys) + _einsum("bthp,bjp->bhtj", q_tail, latent[..., R:])
  weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scale * scores, -1e30), axis=-1), 0)
  return _einsum("bhtj,bjhv->bthv", weights, values).astype(dtype)
