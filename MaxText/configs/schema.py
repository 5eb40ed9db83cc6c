"""Every configuration key of the project, with its type and its meaning.

A field name is a YAML key. Names are MaxText's where MaxText has one; keys that only Kimi has are the
published `config.json` names. Fields without a default are architecture keys: a model file has to state each.

Source: spec section 1.2 (Kimi K3) and section 8 (Kimi-Linear).
"""

import logging
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_LOGGER = logging.getLogger("MaxText")

Positive = Field(gt=0)
DTypeName = Literal["float32", "bfloat16"]
LayerKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]
RematPolicy = Literal["none", "minimal", "full"]


class Config(BaseModel):
  """A frozen, fully checked configuration. `configs.loader` builds it; nothing else reads YAML."""

  model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

  # --- identity ---------------------------------------------------------------------------------------------
  model_name: str
  model_type: Literal["kimi_k3", "kimi_linear"]

  # --- width and depth --------------------------------------------------------------------------------------
  vocab_size: int = Positive
  base_emb_dim: int = Positive
  base_num_decoder_layers: int = Positive
  base_mlp_dim: int = Positive
  hidden_act: Literal["situ", "silu"]
  activation_situ_beta: float | None = Positive
  activation_situ_linear_beta: float | None = Positive
  attn_res_block_size: int | None = Positive
  normalization_layer_epsilon: float = Positive
  max_position_embeddings: int = Positive
  logits_via_embedding: bool
  initializer_range: float = Positive

  # --- full attention (MLA) ---------------------------------------------------------------------------------
  base_num_query_heads: int = Positive
  q_lora_rank: int | None = Positive
  kv_lora_rank: int = Positive
  qk_nope_head_dim: int = Positive
  qk_rope_head_dim: int = Field(ge=0)
  v_head_dim: int = Positive
  mla_use_nope: bool
  mla_use_output_gate: bool
  mla_norm_eps: float = Field(default=1e-6, gt=0)
  full_attn_layers: tuple[int, ...]  # 1-based, as published

  # --- linear attention (KDA) -------------------------------------------------------------------------------
  kda_num_heads: int = Positive
  kda_head_dim: int = Positive
  short_conv_kernel_size: int = Field(gt=1)
  use_full_rank_gate: bool
  gate_lower_bound: float | None  # None: softplus gate, unbounded

  # --- experts ----------------------------------------------------------------------------------------------
  num_experts: int = Positive
  num_experts_per_tok: int = Positive
  shared_experts: int = Field(ge=0)
  base_moe_mlp_dim: int = Positive
  first_num_dense_layers: int = Field(ge=0)
  moe_layer_freq: int = Positive
  routed_expert_hidden_size: int | None = Positive  # None: experts read the hidden state itself
  latent_moe_use_norm: bool
  routed_score_func: Literal["sigmoid", "softmax"]
  norm_topk_prob: bool
  routed_scaling_factor: float = Positive
  n_routing_groups: int = Positive
  topk_routing_group: int = Positive
  expert_quantization: Literal["none", "mxfp4"]

  # --- special ids ------------------------------------------------------------------------------------------
  bos_token_id: int | None
  eos_token_id: int | None
  pad_token_id: int | None

  # --- the rest of a published config.json: unread, kept so that export loses nothing -----------------------
  published_extra: dict[str, Any] = Field(default_factory=dict)

  # --- how it runs (base.yml states the defaults) -----------------------------------------------------------
  dtype: DTypeName = "float32"
  weight_dtype: DTypeName | None = None  # None: same as dtype
  scan_layers: bool | Literal["auto"] = "auto"
  remat_policy: RematPolicy = "none"
  lora_rank: int = Field(default=0, ge=0)  # 0: no adapters
  lora_alpha: float = Field(default=16.0, gt=0)
  lora_targets: tuple[str, ...] = ("self_attn",)
  lora_experts: Literal["shared_a", "per_expert"] = "shared_a"
  expert_weights: Literal["packed", "dequantized"] = "packed"
  mxfp4_qat: bool = False
  embedding_initializer_range: float | None = Field(default=None, gt=0)
  kda_impl: Literal["auto", "reference", "chunked", "step"] = "auto"
  mla_impl: Literal["auto", "reference", "direct", "absorbed"] = "auto"
  moe_impl: Literal["auto", "reference", "blocked"] = "auto"
  short_conv_impl: Literal["auto", "reference", "shifted"] = "auto"
  moe_dispatch: Literal["local_experts", "ragged_all_to_all"] = "local_experts"
  moe_capacity_factor: float | None = Field(default=None, gt=0)

  def layer_kind(self, layer: int) -> LayerKind:
    """Attention kind of 0-based `layer`; the published lists are 1-based (spec 1.2)."""
    return "mla" if layer + 1 in self.full_attn_layers else "kda"

  def mlp_kind(self, layer: int) -> MlpKind:
    """Feed-forward kind of 0-based `layer`."""
    dense = layer < self.first_num_dense_layers or layer % self.moe_layer_freq != 0
    return "dense" if dense else "moe"

  @property
  def parameter_dtype(self) -> DTypeName:
    """Dtype that matrices and norms are held in; `weight_dtype` left out means the compute dtype."""
    return self.weight_dtype or self.dtype

  @property
  def packs_experts(self) -> bool:
    """Whether the routed experts stay MXFP4 bytes in memory."""
    return self.expert_quantization == "mxfp4" and self.expert_weights == "packed"

  @property
  def expert_input_dim(self) -> int:
    """Width that the routed experts read and write: the latent, or the hidden width without one."""
    return self.routed_expert_hidden_size or self.base_emb_dim

  @property
  def latent_width(self) -> int:
    """Values that one token leaves in an MLA cache: normed latent plus the shared unrotated tail."""
    return self.kv_lora_rank + self.qk_rope_head_dim

  def __hash__(self) -> int:
    """Hashes everything but `published_extra`, so that a configuration can be a static argument of jit."""
    return hash(tuple(getattr(self, name) for name in Config.model_fields if name != "published_extra"))

  @model_validator(mode="after")
  def _check(self) -> "Config":
    for key, problem in (*self._depth_problems(), *self._attention_problems(), *self._expert_problems()):
      raise ValueError(f"{key}: {problem}")
    if self.num_experts_per_tok == 1 and self.norm_topk_prob:
      _LOGGER.warning("num_experts_per_tok=1 with norm_topk_prob: the router's only weight is 1, no gradient")
    return self

  def _depth_problems(self) -> Iterator[tuple[str, str]]:
    layers, depth = self.full_attn_layers, self.base_num_decoder_layers
    if list(layers) != sorted(set(layers)):
      yield "full_attn_layers", f"{list(layers)} is not strictly increasing"
    elif layers and not 1 <= layers[0] <= layers[-1] <= depth:
      yield "full_attn_layers", f"{list(layers)} leaves 1..{depth} (layers count from 1, as published)"
    if self.first_num_dense_layers > depth:
      yield "first_num_dense_layers", f"{self.first_num_dense_layers} exceeds the depth of {depth}"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
      token = getattr(self, key)
      if token is not None and not 0 <= token < self.vocab_size:
        yield key, f"{token} is outside the vocabulary of {self.vocab_size}"

  def _attention_problems(self) -> Iterator[tuple[str, str]]:
    if not self.mla_use_nope:
      yield "mla_use_nope", "false asks for rotary embeddings, which this model family does not have"
    if self.gate_lower_bound is not None and not -5 <= self.gate_lower_bound < 0:
      yield "gate_lower_bound", f"{self.gate_lower_bound} is outside [-5, 0); null means the softplus gate"
    # without a linear beta the up branch of situ passes uncapped (spec 2.6); the key itself has to be stated
    if self.hidden_act == "situ" and self.activation_situ_beta is None:
      yield "hidden_act", "situ needs activation_situ_beta"

  def _expert_problems(self) -> Iterator[tuple[str, str]]:
    experts, groups, chosen = self.num_experts, self.n_routing_groups, self.topk_routing_group
    reachable = chosen * (experts // groups)
    if experts % groups:
      yield "n_routing_groups", f"{groups} does not divide the {experts} experts"
    elif chosen > groups:
      yield "topk_routing_group", f"{chosen} exceeds n_routing_groups {groups}"
    elif self.num_experts_per_tok > reachable:
      yield "num_experts_per_tok", f"{self.num_experts_per_tok} exceeds the {reachable} that can be chosen"
    if self.moe_capacity_factor is not None and self.moe_dispatch == "local_experts":
      yield "moe_capacity_factor", "local_experts drops nothing; give moe_dispatch=ragged_all_to_all with it"
    if self.latent_moe_use_norm and self.routed_expert_hidden_size is None:
      yield "latent_moe_use_norm", "true needs routed_expert_hidden_size, the latent that it normalises"
    if self.expert_quantization == "mxfp4":
      latent = "base_emb_dim" if self.routed_expert_hidden_size is None else "routed_expert_hidden_size"
      for key in (latent, "base_moe_mlp_dim"):
        if getattr(self, key) % 32:
          yield key, f"{getattr(self, key)} is no multiple of 32, the group that mxfp4 scales"
    elif self.mxfp4_qat:
      yield "mxfp4_qat", f"true needs expert_quantization mxfp4, not {self.expert_quantization}"
