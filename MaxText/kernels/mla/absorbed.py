"""Latent attention on the latents themselves: decode.

The key expansion moves to the query and the value expansion to the output, so that a step reads each cached
row once for all heads and never builds a key or a value.

Dims: B batch, T new tokens, S cache slots, H heads, N nope width, P tail width, R latent rank, V value width.
Source: spec section 2.5, "absorbed form".
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from MaxText.kernels.mla.blocks import attend_own, attend_prefix, visible_documents
from MaxText.kernels.mla.pages import Rows
from MaxText.kernels.mla.partial_softmax import einsum_f32, finish_part, merge_parts


def mla_absorbed(
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
  """Attends over latent rows shared by the heads; arguments as `mla`."""
  dtype, R = q_nope.dtype, w_uk.shape[-1]
  lifted = einsum_f32("bthn,hnr->bthr", q_nope, w_uk).astype(dtype)
  queries = jnp.concatenate([lifted, q_tail], axis=-1)
  documents = visible_documents(segment_ids, *latent.shape[:2])
  part = attend_own(queries, latent, latent, documents, scale)
  if prefix is not None:
    # whole rows as values too: the tail's sum is dropped below, which is cheaper than slicing the pool
    rows = attend_prefix(queries, lambda rows: (rows, rows), latent.shape[-1], prefix, documents, scale)
    part = merge_parts(rows, part)
  mixed = finish_part(part)[..., :R].astype(dtype)
  return einsum_f32("bthr,hvr->bthv", mixed, w_uv).astype(dtype)
