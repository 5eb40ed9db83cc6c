"""Every operation of Kimi K3 and Kimi-Linear, one short float64 function each.

Dims: T tokens, C channels, D model, H heads, K key width, V value width, E experts, A chosen ones, W taps.
Arrays are of one sequence; matrices are [out, in] as published.
Source: spec section 2 (mathematics) and 3.1 (MXFP4).
"""

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def sigmoid(x: np.ndarray) -> np.ndarray:
  """Logistic function of any shape, without overflow."""
  return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
  """x * sigmoid(x), any shape."""
  return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
  """ln(1 + e^x) of any shape, without overflow."""
  return np.logaddexp(0.0, x)


def softmax(x: np.ndarray) -> np.ndarray:
  """Normalised exponentials along the last axis; -inf entries get 0."""
  e = np.exp(x - x.max(axis=-1, keepdims=True))
  return e / e.sum(axis=-1, keepdims=True)


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
  """Applies a published [out, in] matrix to x [T, in]."""
  return x @ weight.T


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
  """Divides x [..., D] by its root mean square and multiplies by scale [D] (2.1)."""
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def l2_normalize(x: np.ndarray, eps: float) -> np.ndarray:
  """Scales x [..., K] to unit length; eps joins the sum of squares, not their mean (2.4.3)."""
  return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def situ(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float | None) -> np.ndarray:
  """SiTU (2.6): both branches soft-capped; the sigmoid reads the uncapped gate.

  Args:
    gate: any shape.
    up: shape of gate.
    beta: cap of the gate branch.
    linear_beta: cap of the up branch; None leaves it linear.
  """
  capped = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
  return beta * np.tanh(gate / beta) * sigmoid(gate) * capped


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
  """silu(gate) * up, any shape (section 8)."""
  return silu(gate) * up


def short_conv(x: np.ndarray, taps: np.ndarray) -> np.ndarray:
  """Causal depthwise convolution of x [T, C] with taps [C, W], then SiLU (2.4.2).

  The last tap meets the current token; zeros stand before the sequence.
  """
  width = taps.shape[-1]
  padded = np.concatenate([np.zeros((width - 1, x.shape[1]), x.dtype), x])
  return silu(sum(padded[j : j + len(x)] * taps[:, j] for j in range(width)))


def decay_gate(
  z: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray, lower_bound: float | None
) -> np.ndarray:
  """Log decay, natural and <= 0, of every key channel (2.4.4, section 8).

  Args:
    z: [T, H, K] gate projection.
    a_log: [H] log speed, one a head.
    dt_bias: [H, K] bias, one a channel.
    lower_bound: the bounded gate's floor (-5 in K3); None for the unbounded softplus gate.
  """
  speed = np.exp(a_log)[:, None]
  if lower_bound is None:
    return -speed * softplus(z + dt_bias)
  return lower_bound * sigmoid(speed * (z + dt_bias))


def delta_step(
  state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, log_decay: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """One token of the delta rule (2.4.6): decay, write the error, read after the write.

  Args:
    state: [H, K, V] memory before the token.
    q: [H, K] query, scaled.
    k: [H, K] key of unit length.
    v: [H, V] value.
    log_decay: [H, K] natural log.
    beta: [H] write strength.

  Returns:
    Output [H, V] and the memory after the token [H, K, V].
  """
  state = state * np.exp(log_decay)[..., None]
  error = v - np.einsum("hk,hkv->hv", k, state)
  state = state + np.einsum("h,hk,hv->hkv", beta, k, error)
  return np.einsum("hk,hkv->hv", q, state), state


def delta_rule(
  q: np.ndarray, k: np.ndarray, v: np.ndarray, log_decay: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Folds `delta_step` over T tokens from an empty memory.

  Returns:
    Outputs [T, H, V] and the last memory [H, K, V].
  """
  state = np.zeros((*k.shape[1:], v.shape[-1]), v.dtype)
  outputs = []
  for token in zip(q, k, v, log_decay, beta):
    out, state = delta_step(state, *token)
    outputs.append(out)
  return np.stack(outputs), state


def gated_norm(o: np.ndarray, scale: np.ndarray, gate: np.ndarray, eps: float) -> np.ndarray:
  """KDA's output gate (2.4.7): RMS norm of o [T, H, V] per head, then sigmoid(gate [T, H, V])."""
  return rms_norm(o, scale, eps) * sigmoid(gate)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
  """Causal softmax attention of q, k [T, H, K] over v [T, H, V] (2.5.4)."""
  scores = np.einsum("thk,shk->hts", q, k) * scale
  scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
  return np.einsum("hts,shv->thv", softmax(scores), v)


def depth_mix(sources: list[np.ndarray], scale: np.ndarray, proj: np.ndarray, eps: float) -> np.ndarray:
  """AttnRes (2.3): softmax over depth of normed sources' scores, applied to the raw sources.

  Args:
    sources: closed blocks in order, then the running prefix, each [T, D].
    scale: [D] weight of the score norm.
    proj: [D] pseudo-query.
    eps: of the score norm.
  """
  values = np.stack(sources, axis=-2)
  scores = rms_norm(values, scale, eps) @ proj
  return np.einsum("ts,tsd->td", softmax(scores), values)


def select_experts(biased: np.ndarray, top_k: int, groups: int, top_groups: int) -> np.ndarray:
  """Ids [T, A] of the best experts by biased score [T, E]; the lowest id wins a tie (2.7.2).

  With more groups than `top_groups`, only the groups with the best sum of two scores take part.
  """
  if groups > top_groups:
    grouped = biased.reshape(len(biased), groups, -1)
    strength = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
    kept = np.argsort(-strength, axis=-1, kind="stable")[:, :top_groups]
    mask = np.zeros(strength.shape, dtype=bool)
    np.put_along_axis(mask, kept, True, axis=-1)
    biased = np.where(mask[..., None], grouped, -np.inf).reshape(biased.shape)
  return np.argsort(-biased, axis=-1, kind="stable")[:, :top_k]


def expert_weights(scores: np.ndarray, experts: np.ndarray, renormalize: bool, scaling: float) -> np.ndarray:
  """Weights [T, A] of the chosen experts, from the unbiased scores [T, E] (2.7.3)."""
  chosen = np.take_along_axis(scores, experts, axis=-1)
  if renormalize:
    chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20)
  return chosen * scaling


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """Values [N, K] of MXFP4 bytes packed [N, K/2] with E8M0 scales [N, K/32] (3.1)."""
  codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scale.shape, 32)
  values = E2M1[codes] * np.exp2(scale.astype(np.float64) - 127.0)[..., None]
  return values.reshape(len(packed), -1)
