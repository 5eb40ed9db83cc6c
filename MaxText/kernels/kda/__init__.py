"""Kimi Delta Attention: a matrix memory that decays per channel and is corrected by the delta rule.

Dims: B batch, T new tokens, H heads, K key width, V value width. Source: spec section 2.4, arXiv:2510.26692.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from MaxText.common.choices import record
from MaxText.kernels.kda.chunked import kda_chunked
from MaxText.kernels.kda.gates import log_decay_bounded, log_decay_softplus
from MaxText.kernels.kda.reference import kda_reference
from MaxText.kernels.kda.step import kda_single_step

__all__ = ["KdaImpl", "kda", "log_decay_bounded", "log_decay_softplus"]

KdaImpl = Literal["auto", "reference", "chunked", "step"]

_IMPLEMENTATIONS = {"reference": kda_reference, "chunked": kda_chunked, "step": kda_single_step}


def kda(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  log_decay: Float32[Array, "B T H K"],
  beta: Float32[Array, "B T H"],
  state: Float32[Array, "B H K V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  *,
  impl: KdaImpl = "auto",
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
  """Runs T tokens through the memory of each head.

  Args:
    q: [B, T, H, K] query, L2-normalised and scaled by K**-0.5.
    k: [B, T, H, K] key, L2-normalised.
    v: [B, T, H, V] value.
    log_decay: [B, T, H, K] natural log of the decay, finite and <= 0, from `log_decay_bounded` or
      `log_decay_softplus`; any magnitude.
    beta: [B, T, H] write strength after the sigmoid.
    state: [B, H, K, V] memory before the first token; it continues the row's first segment. None is zero.
    segment_ids: [B, T] 0 for padding, else the document of the token. None: every token is of one document.
    impl: `reference` scans token by token, `chunked` takes any T, `step` takes T == 1; `auto` picks `step`
      for T == 1 and `chunked` otherwise, never the token scan.

  Returns:
    output [B, T, H, V] float32, zero at padding, and the memory [B, H, K, V] float32 after the last segment.

  Raises:
    UnsupportedError: `step` with T != 1.
  """
  if impl == "auto":
    impl = "step" if q.shape[1] == 1 else "chunked"
  record("kda", impl)
  B, T, H, K = q.shape
  if state is None:
    state = jnp.zeros((B, H, K, v.shape[-1]), jnp.float32)
  return _IMPLEMENTATIONS[impl](q, k, v, log_decay, beta, state, segment_ids)
