"""Token embedding: a table look-up, no scaling, no position (spec 2.2)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config


class Embedding(nnx.Module):
  """Rows of a [vocab, D] table."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    self.dtype = cfg.dtype
    stddev = cfg.embedding_initializer_range or cfg.initializer_range
    self.embedding = params.param(
      rngs,
      (cfg.vocab_size, cfg.base_emb_dim),
      ("vocab", "embed"),
      cfg.parameter_dtype,
      params.normal(stddev, zero_row=cfg.pad_token_id),
    )

  def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Looks up ids [B, T]; an id outside the vocabulary yields NaN rather than a neighbour's row."""
    rows = self.embedding[...].at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return rows.astype(self.dtype)
