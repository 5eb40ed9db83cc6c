"""Document boundaries of a packed or padded row, as every sequence operator here reads them.

Segment id 0 is padding; equal nonzero ids are one document. Padding may stand before, between or inside
documents, so that "the previous token" is the previous *valid* token of the same document. What a cache
brings in (state, convolution window, latent prefix) continues the first document of the row and no other.

Dims: B batch, T new tokens.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def previous_valid(valid: Bool[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns for each position the last valid position at or before it.

  Args:
    valid: [B, T] tokens that are not padding.

  Returns:
    position [B, T] int32, -1 where no valid token has come yet.
  """
  position = jnp.where(valid, jnp.arange(valid.shape[1], dtype=jnp.int32), -1)
  return lax.cummax(position, axis=1)


def document_order(segment_ids: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
  """Numbers the documents of each row from 0, so that document 0 is the one that a cache continues.

  Padding carries the number of the document before it, leading padding that of the first document: a padded
  position never looks like a boundary.

  Args:
    segment_ids: [B, T] 0 for padding, else the document of the token.

  Returns:
    order [B, T] int32, non-decreasing along T, and valid [B, T].
  """
  valid = segment_ids != 0
  source = previous_valid(valid)
  first = jnp.argmax(valid, axis=1).astype(source.dtype)[:, None]
  filled = jnp.take_along_axis(segment_ids, jnp.where(source < 0, first, source), axis=1)
  starts = filled[:, 1:] != filled[:, :-1]
  order = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
  return jnp.pad(order, ((0, 0), (1, 0))), valid
