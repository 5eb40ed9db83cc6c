"""Kimi K3 and Kimi-Linear as one float64 NumPy model over a published checkpoint directory.

Written as the definition, not for speed: a token loop for KDA, full softmax for MLA, one expert at a time.
Tensors keep their stored bytes until the moment of use.
Source: spec sections 2, 3 and 8. Dims: T tokens, D model, H heads, N nope width, P tail width, V value width.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.reference import ops, tensors


class Reference:
  """A published checkpoint that turns token ids into logits.

  Attributes:
    cfg: the text configuration as published.
  """

  def __init__(
    self,
    directory: str | Path,
    *,
    mla_norm_eps: float = 1e-6,
    l2_eps: float = 1e-6,
    dtype: type = np.float64,
  ):
    """Opens a checkpoint.

    Args:
      directory: config.json and safetensors files, K3's nested form or Kimi-Linear's flat form.
      mla_norm_eps: of q_a_layernorm and kv_a_layernorm (spec 9-D1).
      l2_eps: of the query and key normalisation.
      dtype: of every operation; float32 shows how far rounding alone moves the logits.
    """
    config = json.loads((Path(directory) / "config.json").read_text())
    self.cfg = config.get("text_config", config)
    self.linear_cfg = self.cfg["linear_attn_config"]
    self.eps, self.mla_norm_eps, self.l2_eps = self.cfg["rms_norm_eps"], mla_norm_eps, l2_eps
    self.dtype = dtype
    stored = tensors.read_directory(Path(directory))
    self._tensors = {name.removeprefix("language_model."): array for name, array in stored.items()}

  def logits(self, ids: Sequence[int]) -> np.ndarray:
    """Returns [T, vocabulary] for the token ids of one document."""
    x = self.weight("model.embed_tokens.weight")[np.asarray(ids)]
    stack = self._attn_res_stack if self.cfg.get("attn_res_block_size") else self._residual_stack
    x = ops.rms_norm(stack(x), self.weight("model.norm.weight"), self.eps)
    head = "model.embed_tokens.weight" if self.cfg["tie_word_embeddings"] else "lm_head.weight"
    return ops.linear(x, self.weight(head))

  def weight(self, name: str) -> np.ndarray:
    """The tensor `name` in the compute dtype; a packed expert is decoded."""
    if name in self._tensors:
      return self._tensors[name].astype(self.dtype)
    stem = name.removesuffix("weight")
    packed, scale = self._tensors[stem + "weight_packed"], self._tensors[stem + "weight_scale"]
    return ops.decode_mxfp4(packed, scale).astype(self.dtype)

  def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
    """Attention of 0-based `layer` on the normed input x [T, D]; the published list is 1-based."""
    prefix = f"model.layers.{layer}.self_attn."
    return (self.mla if layer + 1 in self.linear_cfg["full_attn_layers"] else self.kda)(prefix, x)

  def feed_forward(self, layer: int, x: np.ndarray) -> np.ndarray:
    """Dense MLP or mixture of experts of 0-based `layer` on the normed input x [T, D]."""
    prefix = f"model.layers.{layer}."
    if layer < self.cfg["first_k_dense_replace"] or layer % self.cfg["moe_layer_freq"]:
      return self._mlp(prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"), x)
    return self.moe(prefix + "block_sparse_moe.", x)

  def kda(self, prefix: str, x: np.ndarray) -> np.ndarray:
    """Kimi Delta Attention of x [T, D] (2.4)."""
    w, heads = self._scope(prefix), (len(x), self.linear_cfg["num_heads"], self.linear_cfg["head_dim"])

    def mixed(name):
      taps = w(f"{name}_conv1d.weight")
      channels = ops.short_conv(ops.linear(x, w(f"{name}_proj.weight")), taps.reshape(len(taps), -1))
      return channels.reshape(heads)

    q = ops.l2_normalize(mixed("q"), self.l2_eps) * heads[-1] ** -0.5
    k = ops.l2_normalize(mixed("k"), self.l2_eps)
    z = ops.linear(ops.linear(x, w("f_a_proj.weight")), w("f_b_proj.weight")).reshape(heads)
    # the stored A_log may be wider than the heads: only the first ones live (spec 9-D7)
    a_log, dt_bias = w("A_log").reshape(-1)[: heads[1]], w("dt_bias").reshape(heads[1:])
    decay = ops.decay_gate(z, a_log, dt_bias, self.linear_cfg.get("gate_lower_bound"))
    beta = ops.sigmoid(ops.linear(x, w("b_proj.weight")))
    out, _ = ops.delta_rule(q, k, mixed("v"), decay, beta)
    if self.linear_cfg.get("use_full_rank_gate"):
      gate = ops.linear(x, w("g_proj.weight"))
    else:
      gate = ops.linear(ops.linear(x, w("g_a_proj.weight")), w("g_b_proj.weight"))
    out = ops.gated_norm(out, w("o_norm.weight"), gate.reshape(heads), self.eps)
    return ops.linear(out.reshape(len(x), -1), w("o_proj.weight"))

  def mla(self, prefix: str, x: np.ndarray) -> np.ndarray:
    """Multi-head latent attention of x [T, D], without any position (2.5)."""
    w, cfg = self._scope(prefix), self.cfg
    T, H, N, R = len(x), cfg["num_attention_heads"], cfg["qk_nope_head_dim"], cfg["kv_lora_rank"]
    if cfg["q_lora_rank"] is None:
      q = ops.linear(x, w("q_proj.weight"))
    else:
      low = ops.linear(x, w("q_a_proj.weight"))
      q = ops.linear(ops.rms_norm(low, w("q_a_layernorm.weight"), self.mla_norm_eps), w("q_b_proj.weight"))
    q = q.reshape(T, H, N + cfg["qk_rope_head_dim"])
    latent, tail = np.split(ops.linear(x, w("kv_a_proj_with_mqa.weight")), [R], axis=-1)
    latent = ops.rms_norm(latent, w("kv_a_layernorm.weight"), self.mla_norm_eps)
    up = ops.linear(latent, w("kv_b_proj.weight")).reshape(T, H, N + cfg["v_head_dim"])
    shared_tail = np.broadcast_to(tail[:, None, :], (T, H, tail.shape[-1]))
    k = np.concatenate([up[..., :N], shared_tail], axis=-1)
    out = ops.attention(q, k, up[..., N:], q.shape[-1] ** -0.5).reshape(T, -1)
    if cfg.get("mla_use_output_gate"):
      out = out * ops.sigmoid(ops.linear(x, w("g_proj.weight")))
    return ops.linear(out, w("o_proj.weight"))

  def moe(self, prefix: str, x: np.ndarray) -> np.ndarray:
    """Mixture of experts of x [T, D], in the latent where the model has one (2.7)."""
    w, cfg = self._scope(prefix), self.cfg
    experts, weights = self.route(prefix, x)
    latent = bool(cfg.get("routed_expert_hidden_size"))
    z = ops.linear(x, w("routed_expert_down_proj.weight")) if latent else x
    y = np.zeros_like(z)
    for e in np.unique(experts):
      rows, slots = np.nonzero(experts == e)
      out = self._mlp(f"{prefix}experts.{e}.", ("w1", "w3", "w2"), z[rows])
      y[rows] += weights[rows, slots, None] * out
    if latent and cfg["latent_moe_use_norm"]:
      y = ops.rms_norm(y, w("routed_expert_norm.weight"), self.eps)
    if latent:
      y = ops.linear(y, w("routed_expert_up_proj.weight"))
    if cfg["num_shared_experts"]:
      y = y + self._mlp(prefix + "shared_experts.", ("gate_proj", "up_proj", "down_proj"), x)
    return y

  def route(self, prefix: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids [T, A] and weights [T, A] for x [T, D] (2.7.1 to 2.7.3)."""
    w, cfg = self._scope(prefix), self.cfg
    activation = {"sigmoid": ops.sigmoid, "softmax": ops.softmax}[cfg["moe_router_activation_func"]]
    scores = activation(ops.linear(x, w("gate.weight")))
    biased = scores + w("gate.e_score_correction_bias")
    top_k, groups, top_groups = cfg["num_experts_per_token"], cfg["num_expert_group"], cfg["topk_group"]
    experts = ops.select_experts(biased, top_k, groups, top_groups)
    scaling = cfg["routed_scaling_factor"]
    return experts, ops.expert_weights(scores, experts, cfg["moe_renormalize"], scaling)

  def _mlp(self, prefix: str, names: tuple[str, str, str], x: np.ndarray) -> np.ndarray:
    gate, up, down = (self.weight(f"{prefix}{name}.weight") for name in names)
    gate, up = ops.linear(x, gate), ops.linear(x, up)
    if self.cfg["hidden_act"] == "situ":
      caps = self.cfg["activation_situ_beta"], self.cfg["activation_situ_linear_beta"]
      return ops.linear(ops.situ(gate, up, *caps), down)
    return ops.linear(ops.swiglu(gate, up), down)

  def _residual_stack(self, x: np.ndarray) -> np.ndarray:
    for layer in range(self.cfg["num_hidden_layers"]):
      x = x + self.attention(layer, self._norm(layer, "input_layernorm", x))
      x = x + self.feed_forward(layer, self._norm(layer, "post_attention_layernorm", x))
    return x

  def _attn_res_stack(self, x: np.ndarray) -> np.ndarray:
    prefix, blocks = x, []
    for layer in range(self.cfg["num_hidden_layers"]):
      name = f"model.layers.{layer}."
      h = self._mix(f"{name}self_attention_res", blocks, prefix)
      if layer % self.cfg["attn_res_block_size"] == 0:
        blocks, prefix = [*blocks, prefix], np.zeros_like(prefix)
      prefix = prefix + self.attention(layer, self._norm(layer, "input_layernorm", h))
      h = self._mix(f"{name}mlp_res", blocks, prefix)
      prefix = prefix + self.feed_forward(layer, self._norm(layer, "post_attention_layernorm", h))
    return self._mix("model.output_attn_res", blocks, prefix)

  def _mix(self, name: str, blocks: list[np.ndarray], prefix: np.ndarray) -> np.ndarray:
    if not blocks:  # layer 0 sees the embedding alone, and its mixing weights are never read
      return prefix
    scale, proj = self.weight(f"{name}_norm.weight"), self.weight(f"{name}_proj.weight")
    return ops.depth_mix([*blocks, prefix], scale, proj.reshape(-1), self.eps)

  def _norm(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
    return ops.rms_norm(x, self.weight(f"model.layers.{layer}.{name}.weight"), self.eps)

  def _scope(self, prefix: str):
    return lambda name: self.weight(prefix + name)
