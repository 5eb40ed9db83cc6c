"""Latent attention with expanded keys and values: prefill and training.

Dims: B batch, T new tokens, S cache slots, H heads, N nope width, P tail width, R latent rank, V value width.
Source: spec section 2.5 steps 3 and 4.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText.kernels.mla.blocks import attend_own, attend_prefix, visible_documents
from MaxText.kernels.mla.pages import Rows
from MaxText.kernels.mla.partial_softmax import einsum_f32, finish_part, merge_parts


def mla_direct(
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
  """Expands the latent rows block by block and attends per head; arguments as `mla`."""
  H, R = w_uk.shape[0], w_uk.shape[-1]

  def expand(rows):
    keys = einsum_f32("bjr,hnr->bjhn", rows[..., :R], w_uk).astype(rows.dtype)
    tail = jnp.broadcast_to(rows[:, :, None, R:], (*rows.shape[:2], H, rows.shape[-1] - R))
    values = einsum_f32("bjr,hvr->bjhv", rows[..., :R], w_uv).astype(rows.dtype)
    return jnp.concatenate([keys, tail], axis=-1), values

  queries = jnp.concatenate([q_nope, q_tail], axis=-1)
  documents = visible_documents(segment_ids, *latent.shape[:2])
  part = attend_own(queries, *expand(latent), documents, scale)
  if prefix is not None:
    part = merge_parts(attend_prefix(queries, expand, w_uv.shape[1], prefix, documents, scale), part)
  return finish_part(part).astype(q_nope.dtype)
