"""Kimi Delta Attention, the linear-attention layer. Source: spec 2.4.

The same call trains (cache=None), prefills (T > 1) and decodes (T == 1).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.kernels.kda import gates, kda
from MaxText.kernels.short_conv import short_conv
from MaxText.layers.cache import KdaCache, Row
from MaxText.layers.normalization import unit_l2, unit_rms
from MaxText.layers.projection import Projection


class KimiDeltaAttention(nnx.Module):
  """A delta rule over a [K, V] memory per head, with a forget gate per key channel."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    D, H, K = cfg.base_emb_dim, cfg.kda_num_heads, cfg.kda_head_dim
    self.cfg = cfg
    self.q_proj = Projection(cfg, D, H * K, ("heads", "embed"), rngs=rngs)
    self.k_proj = Projection(cfg, D, H * K, ("heads", "embed"), rngs=rngs)
    self.v_proj = Projection(cfg, D, H * K, ("heads", "embed"), rngs=rngs)
    self.f_a_proj = Projection(cfg, D, K, (None, "embed"), rngs=rngs)
    self.f_b_proj = Projection(cfg, K, H * K, ("heads", None), rngs=rngs)
    self.b_proj = Projection(cfg, D, H, ("heads", "embed"), rngs=rngs)
    if cfg.use_full_rank_gate:
      self.g_proj = Projection(cfg, D, H * K, ("heads", "embed"), rngs=rngs)
    else:
      self.g_a_proj = Projection(cfg, D, K, (None, "embed"), rngs=rngs)
      self.g_b_proj = Projection(cfg, K, H * K, ("heads", None), rngs=rngs)
    self.o_proj = Projection(cfg, H * K, D, ("embed", "heads"), rngs=rngs)
    self.qkv_conv1d = ShortConvolution(cfg, rngs=rngs)
    self.A_log = params.param(rngs, (H,), ("heads",), "float32", _decay_rate_init(cfg))
    self.dt_bias = params.param(rngs, (H, K), ("heads", "head_dim"), "float32", _time_step_init)
    self.o_norm = HeadNorm(K, cfg.normalization_layer_epsilon, rngs=rngs)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    cache: KdaCache | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    row: Row = None,
  ) -> tuple[Float[Array, "B T D"], KdaCache | None]:
    """Runs T tokens of B rows.

    Args:
      x: [B, T, D] normalised activations.
      cache: memory before the first token, or None in training.
      segment_ids: [B, T] document of each token, 0 = padding; None when every token is valid.
      row: which layer of a stacked cache pool.

    Returns:
      [B, T, D] in x.dtype, and the memory after the last valid token (None when none came in).
    """
    memory = None if cache is None else cache.read(row)
    q, k, v, window = self._mix_short(x, memory, segment_ids)
    log_decay, beta = self._gates(x)
    out, state = kda(q, k, v, log_decay, beta, memory and memory.state, segment_ids, impl=self.cfg.kda_impl)
    y = self._read_out(out.astype(x.dtype), x)
    return y, cache and cache.write(row, KdaCache(window, state))

  def _mix_short(self, x, memory, segment_ids):
    """Convolved and normalised q, k [B, T, H, K] and v [B, T, H, V] in float32, and the new window."""
    # stacked, not concatenated: a channel axis that is sharded by heads must not mix q, k and v
    qkv = jnp.stack([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=2)
    qkv, window = short_conv(
      qkv, self.qkv_conv1d.weight[...], memory and memory.conv, segment_ids, impl=self.cfg.short_conv_impl
    )
    heads = qkv.reshape(*qkv.shape[:3], self.cfg.kda_num_heads, self.cfg.kda_head_dim)
    q = unit_l2(heads[:, :, 0]) * self.cfg.kda_head_dim**-0.5
    return q, unit_l2(heads[:, :, 1]), heads[:, :, 2].astype(jnp.float32), window

  def _gates(self, x):
    """Log decay [B, T, H, K] (natural log, <= 0) and write strength beta [B, T, H], both float32."""
    z = self.f_b_proj(self.f_a_proj(x)).reshape(*x.shape[:2], *self.dt_bias.shape)
    beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
    A_log, dt_bias, bound = self.A_log[...], self.dt_bias[...], self.cfg.gate_lower_bound
    if bound is None:
      return gates.log_decay_softplus(z, A_log, dt_bias), beta
    return gates.log_decay_bounded(z, A_log, dt_bias, bound), beta

  def _read_out(self, out: Float[Array, "B T H V"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Normalises each head, gates it by sigmoid(G), and projects back to the stream."""
    G = self.g_proj(x) if self.cfg.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))
    gated = self.o_norm(out) * jax.nn.sigmoid(G.astype(jnp.float32)).reshape(out.shape)
    return self.o_proj(gated.astype(x.dtype).reshape(*x.shape[:2], -1))


class ShortConvolution(nnx.Module):
  """Depthwise taps of the q, k and v convolutions, [3, H*K, W] float32; the last tap is the current token."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    shape = (3, cfg.kda_num_heads * cfg.kda_head_dim, cfg.short_conv_kernel_size)
    # the published code leaves its convolutions at the framework's own rule, fan-in W
    init = params.kaiming_uniform(cfg.short_conv_kernel_size)
    self.weight = params.param(rngs, shape, (None, "heads", None), "float32", init)


class HeadNorm(nnx.Module):
  """RMSNorm over one head's channels, its weight shared by all heads; float32 for the gate that follows."""

  def __init__(self, width: int, eps: float, *, rngs: nnx.Rngs):
    self.eps = eps
    self.scale = params.param(rngs, (width,), ("head_dim",), "float32", params.ones)

  def __call__(self, x: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """Normalises x [..., V]; returns float32."""
    return unit_rms(x, self.eps) * self.scale[...]


def _decay_rate_init(cfg: Config) -> params.Initializer:
  """A_log: 0 with the bounded gate, log U(1, 16) with the softplus gate (spec 2.10)."""
  if cfg.gate_lower_bound is not None:
    return params.zeros
  return _log_of_uniform


def _log_of_uniform(key, shape, dtype):
  return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _time_step_init(key, shape, dtype):
  """dt_bias: inverse softplus of a step drawn log-uniformly from [1e-3, 1e-1] (spec 2.10)."""
  log_dt = jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1))
  dt = jnp.maximum(jnp.exp(log_dt), 1e-4)
  return dt + jnp.log(-jnp.expm1(-dt))
