"""Kimi Delta Attention in chunks of 64 tokens: the pure jax form for training and prefill.

Within a chunk the writes of all tokens solve one triangular system, and only the memory between chunks is
carried (`decayed_products` has the pairs, `unit_lower_inverse` the system).

Dims: B batch, T new tokens, H heads, K key width, V value width, C chunk.
Source: spec section 2.4, "chunkwise form".
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from MaxText.kernels.carries import match_manual_axes
from MaxText.kernels.kda.decayed_products import Decays, decayed_products
from MaxText.kernels.kda.reference import silence
from MaxText.kernels.kda.triangular import unit_lower_inverse
from MaxText.kernels.segments import document_order

CHUNK = 64
BLOCKS = (16, 4)

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def kda_chunked(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  log_decay: Float32[Array, "B T H K"],
  beta: Float32[Array, "B T H"],
  state: Float32[Array, "B H K V"],
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
  """Scans over chunks of tokens; arguments as `kda`, each [B, T, ...], state [B, H, K, V].

  The backward pass recomputes each chunk from the memory before it, so that what is kept grows with T / 64.
  """
  B, T = beta.shape[:2]
  order = None
  if segment_ids is not None:
    order, valid = document_order(segment_ids)
    q, k, v, log_decay, beta = silence(valid, q, k, v, log_decay, beta)
  size = min(CHUNK, -(-T // BLOCKS[0]) * BLOCKS[0])
  tokens = tuple(_split(x.astype(jnp.float32), size) for x in (q, k, v, log_decay, beta[..., None]))
  if order is not None:
    order = jnp.pad(order, ((0, 0), (0, -T % size)), mode="edge").reshape(B, -1, size).swapaxes(0, 1)
  state = match_manual_axes(state, q, k, v, log_decay, beta)
  first = None if order is None else jnp.zeros_like(order[0, :, 0])
  body = jax.checkpoint(_chunk, prevent_cse=False)
  (state, _), out = lax.scan(body, (state, first), (tokens, order))
  n, _, H, C, V = out.shape
  return out.transpose(1, 0, 3, 2, 4).reshape(B, n * C, H, V)[:, :T], state


def _split(x, size):
  """[B, T, H, X] -> [T / size, B, H, size, X], with neutral tokens at the end."""
  B, T, H, X = x.shape
  x = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
  return x.reshape(B, -1, size, H, X).transpose(1, 0, 3, 2, 4)


def _chunk(carry, chunk):
  """One chunk: (memory [B, H, K, V], document it belongs to [B]), tokens [B, H, C, ...] -> the same, out."""
  state, document = carry
  (q, k, v, log_decay, beta), order = chunk
  products, decays = decayed_products(jnp.stack([q, k], axis=3), k, jnp.exp(log_decay), BLOCKS)
  lower = jnp.tril(jnp.ones((q.shape[2],) * 2, bool))
  if order is not None:
    lower = lower & (order[:, None, :, None] == order[:, None, None, :])
    decays, document = _within_documents(decays, document, order)
  reads = jnp.where(lower, products[:, :, :, 0], 0)
  overlaps = jnp.where(lower & ~jnp.eye(q.shape[2], dtype=bool), beta * products[:, :, :, 1], 0)
  old = _einsum("bhzik,bhkv->bhziv", jnp.stack([q, k], axis=2) * decays.since[:, :, None], state)
  delta = _einsum("bhij,bhjv->bhiv", unit_lower_inverse(overlaps, BLOCKS[0]), beta * (v - old[:, :, 1]))
  out = old[:, :, 0] + _einsum("bhij,bhjv->bhiv", reads, delta)
  state = decays.total[..., None] * state + _einsum("bhik,bhiv->bhkv", k * decays.until, delta)
  return (state, document), out


def _within_documents(decays, document, order):
  """Cuts the carried memory off from other documents, and all but the last document from the next memory."""
  last = order[:, -1]
  from_carry = (order == document[:, None])[:, None, :, None]
  to_carry = (order == last[:, None])[:, None, :, None]
  carried = (document == last)[:, None, None]
  cut = Decays(
    since=jnp.where(from_carry, decays.since, 0),
    until=jnp.where(to_carry, decays.until, 0),
    total=jnp.where(carried, decays.total, 0),
  )
  return cut, last
