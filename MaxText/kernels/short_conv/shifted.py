"""Short convolution as a sum of W shifted copies of the input.

Dims: B batch, T new tokens, W convolution width, C channels, X = W - 1 + T rows of window and input together.
Source: spec section 2.4 step 2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from MaxText.kernels.segments import document_order, previous_valid


def short_conv_shifted(
  x: Float[Array, "B T *C"],
  weight: Float32[Array, "*C W"],
  window: Float[Array, "B W-1 *C"],
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T *C"], Float[Array, "B W-1 *C"]]:
  """Adds the taps; arguments as `short_conv`: x [B, T, *C], weight [*C, W], window [B, W-1, *C]."""
  T, W = x.shape[1], weight.shape[-1]
  rows = jnp.concatenate([window, x], axis=1)
  if segment_ids is None or T == 1:
    taps = [rows[:, j : j + T] for j in range(W)]
    last = rows[:, T:]
  else:
    taps, last = _document_taps(rows, segment_ids, W)
  y = sum(tap.astype(jnp.float32) * weight[..., j].astype(jnp.float32) for j, tap in enumerate(taps))
  y = jax.nn.silu(y).astype(x.dtype)
  last = last.astype(window.dtype)
  if segment_ids is not None:
    valid = segment_ids != 0
    y = jnp.where(_trailing(valid, y), y, 0)
    if T == 1:
      last = jnp.where(_trailing(valid, last), last, window)
  return y, last


def _document_taps(rows, segment_ids, W):
  """Finds each token's W taps, and the window after the last token, among the valid tokens of its document.

  Args:
    rows: [B, X, *C] window and input; the window belongs to document 0.
    segment_ids: [B, T] document of each token, 0 for padding.
    W: convolution width.

  Returns:
    W taps [B, T, *C], oldest first, and the window [B, W-1, *C].
  """
  order, valid = document_order(segment_ids)
  order = jnp.pad(order, ((0, 0), (W - 1, 0)))
  newest = previous_valid(jnp.pad(valid, ((0, 0), (W - 1, 0)), constant_values=True))
  before = jnp.pad(newest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  # the last column asks for the window: its newest tap is the last valid token
  asking = jnp.concatenate([order[:, W - 1 :], order[:, -1:]], axis=1)
  tokens = jnp.broadcast_to(jnp.arange(W - 1, rows.shape[1]), valid.shape)
  source = jnp.concatenate([tokens, newest[:, -1:]], axis=1)
  taps = []
  for _ in range(W):
    taps.append(_gather(rows, order, source, asking))
    source = jnp.where(source < 0, -1, jnp.take_along_axis(before, jnp.maximum(source, 0), axis=1))
  last = [tap[:, -1:] for tap in taps[: W - 1]]
  return [tap[:, :-1] for tap in reversed(taps)], jnp.concatenate(last[::-1], axis=1)


def _gather(rows, order, source, asking):
  """Rows at `source` where they are of the asking document, else 0."""
  index = jnp.maximum(source, 0)
  same = (source >= 0) & (jnp.take_along_axis(order, index, axis=1) == asking)
  found = jnp.take_along_axis(rows, index.reshape(*index.shape, *(1,) * (rows.ndim - 2)), axis=1)
  return jnp.where(_trailing(same, found), found, 0)


def _trailing(flag, like):
  return flag.reshape(flag.shape + (1,) * (like.ndim - flag.ndim))
