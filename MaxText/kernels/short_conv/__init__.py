"""Short depthwise causal convolution with SiLU, in front of the delta rule.

Dims: B batch, T new tokens, W convolution width, C channels (any number of axes).
Source: spec section 2.4 step 2.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from MaxText.common.choices import record
from MaxText.kernels.short_conv.reference import short_conv_reference
from MaxText.kernels.short_conv.shifted import short_conv_shifted

__all__ = ["ShortConvImpl", "short_conv"]

ShortConvImpl = Literal["auto", "reference", "shifted"]

_IMPLEMENTATIONS = {"reference": short_conv_reference, "shifted": short_conv_shifted}


def short_conv(
  x: Float[Array, "B T *C"],
  weight: Float32[Array, "*C W"],
  window: Float[Array, "B W-1 *C"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  *,
  impl: ShortConvImpl = "auto",
) -> tuple[Float[Array, "B T *C"], Float[Array, "B W-1 *C"]]:
  """Mixes each token with the W-1 tokens before it in its document, per channel, and applies SiLU.

  Args:
    x: [B, T, *C] projections before the convolution.
    weight: [*C, W] taps; the last one is the current token's.
    window: [B, W-1, *C] last inputs before this call; they continue the row's first segment. None is zero.
    segment_ids: [B, T] 0 for padding, else the document of the token. None: every token is of one document.
    impl: `reference` scans token by token, `shifted` adds shifted copies; `auto` is `shifted`.

  Returns:
    output [B, T, *C] in x.dtype (float32 inside), zero at padding, and the window [B, W-1, *C] after the last
    segment, in the dtype of the given window, else x.dtype.
  """
  if impl == "auto":
    impl = "shifted"
  record("short_conv", impl)
  if window is None:
    window = jnp.zeros((x.shape[0], weight.shape[-1] - 1, *x.shape[2:]), x.dtype)
  return _IMPLEMENTATIONS[impl](x, weight, window, segment_ids)
