"""Gated multi-head latent attention without positions. Source: spec 2.5.

The same call trains (cache=None), prefills (T > 1) and decodes (T == 1). A token leaves R + P cached values.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.kernels.mla import mla
from MaxText.layers.cache import MlaCache, MlaPages, Row
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.projection import Projection


class GatedLatentAttention(nnx.Module):
  """Softmax attention whose keys and values are read from one shared latent per token."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    D, H, R = cfg.base_emb_dim, cfg.base_num_query_heads, cfg.kv_lora_rank
    N, P, V = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    self.cfg = cfg
    if cfg.q_lora_rank is None:
      self.q_proj = Projection(cfg, D, H * (N + P), ("heads", "embed"), rngs=rngs)
    else:
      self.q_a_proj = Projection(cfg, D, cfg.q_lora_rank, ("q_lora", "embed"), rngs=rngs)
      self.q_a_layernorm = RMSNorm(cfg.q_lora_rank, cfg.mla_norm_eps, cfg.parameter_dtype, rngs=rngs)
      self.q_b_proj = Projection(cfg, cfg.q_lora_rank, H * (N + P), ("heads", "q_lora"), rngs=rngs)
    self.kv_a_proj_with_mqa = Projection(cfg, D, R + P, ("kv_lora", "embed"), rngs=rngs)
    self.kv_a_layernorm = RMSNorm(R, cfg.mla_norm_eps, cfg.parameter_dtype, rngs=rngs)
    draw = params.normal(cfg.initializer_range)
    # kv_b_proj, split per head once at load: the absorbed form reads the halves at different times
    self.k_up = params.param(rngs, (H, N, R), ("heads", "head_dim", "kv_lora"), cfg.parameter_dtype, draw)
    self.v_up = params.param(rngs, (H, V, R), ("heads", "head_dim", "kv_lora"), cfg.parameter_dtype, draw)
    if cfg.mla_use_output_gate:
      self.g_proj = Projection(cfg, D, H * V, ("heads", "embed"), rngs=rngs)
    self.o_proj = Projection(cfg, H * V, D, ("embed", "heads"), rngs=rngs)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    cache: MlaCache | MlaPages | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    row: Row = None,
  ) -> tuple[Float[Array, "B T D"], MlaCache | MlaPages | None]:
    """Runs T tokens of B rows.

    Args:
      x: [B, T, D] normalised activations.
      cache: latents of the tokens before, or None in training.
      segment_ids: [B, T] document of each token, 0 = padding; None when every token is valid.
      row: which layer of a stacked cache pool.

    Returns:
      [B, T, D] in x.dtype, and the cache with the new latents appended (None when none came in).
    """
    cfg = self.cfg
    N, P = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    q = self._queries(x)
    latent = self._latents(x)
    memory = None if cache is None else cache.read(row)
    k_up, v_up = self._expansions()
    out = mla(
      q[..., :N],
      q[..., N:],
      latent,
      k_up.astype(x.dtype),
      v_up.astype(x.dtype),
      prefix=memory and (memory.pages, memory.length),
      segment_ids=segment_ids,
      scale=(N + P) ** -0.5,
      impl=cfg.mla_impl,
    )
    out = out.astype(x.dtype).reshape(*x.shape[:2], -1)
    if cfg.mla_use_output_gate:
      out = out * jax.nn.sigmoid(self.g_proj(x))
    return self.o_proj(out), cache and cache.write(row, memory.append(latent, segment_ids))

  def _expansions(self) -> tuple[Float[Array, "H N R"], Float[Array, "H V R"]]:
    """Latent to keys [H, N, R] and to values [H, V, R], with an adapter's change: every form reads these."""
    k_up, v_up = self.k_up[...], self.v_up[...]
    if not hasattr(self, "kv_b_lora"):
      return k_up, v_up
    keys, values = self.split_heads(self.kv_b_lora.change())
    return k_up + keys, v_up + values

  def split_heads(
    self, kv_b: Float[Array, "*C HNV R"]
  ) -> tuple[Float[Array, "*C H N R"], Float[Array, "*C H V R"]]:
    """Splits rows in the published order, kv_b [..., H*(N+V), R], into key and value rows of each head."""
    H, N, V = self.cfg.base_num_query_heads, self.cfg.qk_nope_head_dim, self.cfg.v_head_dim
    rows = kv_b.reshape(*kv_b.shape[:-2], H, N + V, kv_b.shape[-1])
    return rows[..., :N, :], rows[..., N:, :]

  def _queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H NP"]:
    """Per-head queries [B, T, H, N+P]; the last P channels are matched against the shared tail."""
    cfg = self.cfg
    q = self.q_proj(x) if cfg.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
    return q.reshape(*x.shape[:2], cfg.base_num_query_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)

  def _latents(self, x: Float[Array, "B T D"]) -> Float[Array, "B T RP"]:
    """What a token leaves in the cache, [B, T, R+P]: R normed values and a tail without norm or rotation."""
    full, R = self.kv_a_proj_with_mqa(x), self.cfg.kv_lora_rank
    return jnp.concatenate([self.kv_a_layernorm(full[..., :R]), full[..., R:]], axis=-1)
