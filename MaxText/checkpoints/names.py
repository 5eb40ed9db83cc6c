"""Published tensor names and shapes against parameter paths, as tables.

A row says: this published tensor is that parameter, read through this view. A view is always a NumPy view of
the published array (a reshape or a basic slice), so one definition serves reading and writing and the two
cannot drift. Paths name layers by their 0-based number, whatever the depth layout of a model; `layout.py`
turns them into places of a scanned or unrolled tree. Nothing here allocates: the 497,052 tensors of Kimi K3
are enumerated in seconds.

Dims (columns of a shape): D model, HK KDA heads x width, H KDA heads, K head width, W taps, HQ MLA heads x
(N+P), HV MLA heads x V, HB MLA heads x (N+V), RQ / R query and kv ranks, RP kv rank + tail, FD / FS / F
dense, shared and expert widths, E experts, L expert input.
Source: spec 3, 3.1 (Kimi K3), section 8 (Kimi-Linear).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from MaxText.configs.schema import Config
from MaxText.kernels.mxfp4 import BLOCK

MATRIX, F32, U8 = "BF16", "F32", "U8"
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
# The decoder's prefix in a file; the head stands beside the decoder, so it loses the last part.
PREFIXES = ("language_model.model.", "model.", "")


class Row(NamedTuple):
  """One published tensor: name, shape (columns above), parameter, stored type, view, leading index."""

  published: str
  shape: str
  parameter: str
  dtype: str = MATRIX
  view: str = "same"
  lead: tuple[int, ...] = ()


TOP = (
  Row("embed_tokens.weight", "vocab D", "embed_tokens.embedding"),
  Row("norm.weight", "D", "norm.scale"),
)
TOP_ATTN_RES = (
  Row("output_attn_res_norm.weight", "D", "output_attn_res.norm.scale"),
  Row("output_attn_res_proj.weight", "1 D", "output_attn_res.proj", view="flat"),
)
HEAD = Row("lm_head.weight", "vocab D", "lm_head.weight")

NORMS = (
  Row("input_layernorm.weight", "D", "input_layernorm.scale"),
  Row("post_attention_layernorm.weight", "D", "post_attention_layernorm.scale"),
)
ATTN_RES = (
  Row("self_attention_res_norm.weight", "D", "self_attention_res.norm.scale"),
  Row("self_attention_res_proj.weight", "1 D", "self_attention_res.proj", view="flat"),
  Row("mlp_res_norm.weight", "D", "mlp_res.norm.scale"),
  Row("mlp_res_proj.weight", "1 D", "mlp_res.proj", view="flat"),
)

KDA = (
  Row("self_attn.q_proj.weight", "HK D", "self_attn.q_proj.weight"),
  Row("self_attn.k_proj.weight", "HK D", "self_attn.k_proj.weight"),
  Row("self_attn.v_proj.weight", "HK D", "self_attn.v_proj.weight"),
  Row("self_attn.q_conv1d.weight", "HK 1 W", "self_attn.qkv_conv1d.weight", F32, "conv", (0,)),
  Row("self_attn.k_conv1d.weight", "HK 1 W", "self_attn.qkv_conv1d.weight", F32, "conv", (1,)),
  Row("self_attn.v_conv1d.weight", "HK 1 W", "self_attn.qkv_conv1d.weight", F32, "conv", (2,)),
  Row("self_attn.A_log", "A_log", "self_attn.A_log", F32, "heads"),
  Row("self_attn.dt_bias", "HK", "self_attn.dt_bias", F32, "per_head"),
  Row("self_attn.f_a_proj.weight", "K D", "self_attn.f_a_proj.weight"),
  Row("self_attn.f_b_proj.weight", "HK K", "self_attn.f_b_proj.weight"),
  Row("self_attn.b_proj.weight", "H D", "self_attn.b_proj.weight"),
  Row("self_attn.o_norm.weight", "K", "self_attn.o_norm.scale", F32),
  Row("self_attn.o_proj.weight", "D HK", "self_attn.o_proj.weight"),
)
KDA_FULL_GATE = (Row("self_attn.g_proj.weight", "HK D", "self_attn.g_proj.weight"),)
KDA_LOW_RANK_GATE = (
  Row("self_attn.g_a_proj.weight", "K D", "self_attn.g_a_proj.weight"),
  Row("self_attn.g_b_proj.weight", "HK K", "self_attn.g_b_proj.weight"),
)

MLA = (
  Row("self_attn.kv_a_proj_with_mqa.weight", "RP D", "self_attn.kv_a_proj_with_mqa.weight"),
  Row("self_attn.kv_a_layernorm.weight", "R", "self_attn.kv_a_layernorm.scale"),
  # one matrix, two parameters: per head first the key rows, then the value rows
  Row("self_attn.kv_b_proj.weight", "HB R", "self_attn.k_up", view="key_rows"),
  Row("self_attn.kv_b_proj.weight", "HB R", "self_attn.v_up", view="value_rows"),
  Row("self_attn.o_proj.weight", "D HV", "self_attn.o_proj.weight"),
)
MLA_LOW_RANK_QUERY = (
  Row("self_attn.q_a_proj.weight", "RQ D", "self_attn.q_a_proj.weight"),
  Row("self_attn.q_a_layernorm.weight", "RQ", "self_attn.q_a_layernorm.scale"),
  Row("self_attn.q_b_proj.weight", "HQ RQ", "self_attn.q_b_proj.weight"),
)
MLA_FULL_QUERY = (Row("self_attn.q_proj.weight", "HQ D", "self_attn.q_proj.weight"),)
MLA_GATE = (Row("self_attn.g_proj.weight", "HV D", "self_attn.g_proj.weight"),)

DENSE = (
  Row("mlp.gate_proj.weight", "FD D", "mlp.gate_proj.weight"),
  Row("mlp.up_proj.weight", "FD D", "mlp.up_proj.weight"),
  Row("mlp.down_proj.weight", "D FD", "mlp.down_proj.weight"),
)
ROUTER = (
  Row("block_sparse_moe.gate.weight", "E D", "block_sparse_moe.gate.weight"),
  Row(
    "block_sparse_moe.gate.e_score_correction_bias", "E", "block_sparse_moe.gate.e_score_correction_bias", F32
  ),
)
LATENT = (
  Row(
    "block_sparse_moe.routed_expert_down_proj.weight",
    "L D",
    "block_sparse_moe.routed_expert_down_proj.weight",
  ),
  Row(
    "block_sparse_moe.routed_expert_up_proj.weight", "D L", "block_sparse_moe.routed_expert_up_proj.weight"
  ),
)
LATENT_NORM = (
  Row("block_sparse_moe.routed_expert_norm.weight", "L", "block_sparse_moe.routed_expert_norm.scale"),
)
SHARED = (
  Row(
    "block_sparse_moe.shared_experts.gate_proj.weight",
    "FS D",
    "block_sparse_moe.shared_experts.gate_proj.weight",
  ),
  Row(
    "block_sparse_moe.shared_experts.up_proj.weight", "FS D", "block_sparse_moe.shared_experts.up_proj.weight"
  ),
  Row(
    "block_sparse_moe.shared_experts.down_proj.weight",
    "D FS",
    "block_sparse_moe.shared_experts.down_proj.weight",
  ),
)
EXPERT = (("w1", "F", "L"), ("w2", "L", "F"), ("w3", "F", "L"))  # name, output width, input width


class Place(NamedTuple):
  """Where a view of one tensor lies: `parameter[path][lead]`, `path` with the layer's number in it."""

  path: str
  view: str
  lead: tuple[int, ...] = ()


class TensorSpec(NamedTuple):
  """One tensor of a published checkpoint.

  Attributes:
    name: as it stands in the file, prefix included.
    shape: published shape.
    dtype: published safetensors type ("BF16", "F32", "U8").
    places: the parameters it fills, each through a view of it.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  places: tuple[Place, ...]


def _dims(cfg: Config) -> dict[str, int]:
  heads, kda = cfg.base_num_query_heads, cfg.kda_num_heads
  return {
    "1": 1,
    "vocab": cfg.vocab_size,
    "D": cfg.base_emb_dim,
    "H": kda,
    "K": cfg.kda_head_dim,
    "HK": kda * cfg.kda_head_dim,
    "W": cfg.short_conv_kernel_size,
    "HQ": heads * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim),
    "HV": heads * cfg.v_head_dim,
    "HB": heads * (cfg.qk_nope_head_dim + cfg.v_head_dim),
    "RQ": cfg.q_lora_rank or 0,
    "R": cfg.kv_lora_rank,
    "RP": cfg.latent_width,
    "FD": cfg.base_mlp_dim,
    "FS": cfg.base_moe_mlp_dim * cfg.shared_experts,
    "F": cfg.base_moe_mlp_dim,
    "E": cfg.num_experts,
    "L": cfg.expert_input_dim,
  }


def _a_log_shape(cfg: Config) -> tuple[int, ...]:
  # K3 stores head_dim values of which the first H live; Kimi-Linear stores exactly H behind broadcast axes
  # (spec 8).
  if cfg.model_type == "kimi_k3":
    return (max(cfg.kda_head_dim, cfg.kda_num_heads),)
  return (1, 1, cfg.kda_num_heads, 1)


def _kv_rows(array: np.ndarray, cfg: Config) -> np.ndarray:
  per_head = cfg.qk_nope_head_dim + cfg.v_head_dim
  return array.reshape(cfg.base_num_query_heads, per_head, cfg.kv_lora_rank)


_VIEWS: dict[str, Callable[[np.ndarray, Config], np.ndarray]] = {
  "same": lambda array, cfg: array,
  "flat": lambda array, cfg: array.reshape(-1),
  "conv": lambda array, cfg: array.reshape(-1, cfg.short_conv_kernel_size),
  "heads": lambda array, cfg: array.reshape(-1)[: cfg.kda_num_heads],
  "per_head": lambda array, cfg: array.reshape(cfg.kda_num_heads, cfg.kda_head_dim),
  "key_rows": lambda array, cfg: _kv_rows(array, cfg)[:, : cfg.qk_nope_head_dim],
  "value_rows": lambda array, cfg: _kv_rows(array, cfg)[:, cfg.qk_nope_head_dim :],
}


def view(name: str, array: np.ndarray, cfg: Config) -> np.ndarray:
  """Returns the parameter's reading of a published `array`: a NumPy view, so writing to it fills `array`."""
  return _VIEWS[name](array, cfg)


def accepts(spec: TensorSpec, shape: tuple[int, ...], cfg: Config) -> bool:
  """Whether a file may store `spec` as `shape`: the published one, or the other ranks that are in
  circulation.

  Convolutions come as [HK, 1, W] or [HK, W]; A_log as [n >= H] or as H values behind broadcast axes (spec 8,
  D7).
  """
  kind = spec.places[0].view
  if kind == "conv":
    return shape in (spec.shape, (spec.shape[0], spec.shape[-1]))
  if kind == "heads":
    padded = len(shape) == 1 and shape[0] >= cfg.kda_num_heads
    return padded or tuple(n for n in shape if n != 1) == tuple(n for n in (cfg.kda_num_heads,) if n != 1)
  return shape == spec.shape


def layer_rows(cfg: Config, layer: int) -> tuple[Row, ...]:
  """Returns the rows of 0-based `layer`, experts excepted."""
  rows = NORMS + (ATTN_RES if cfg.attn_res_block_size else ())
  if cfg.layer_kind(layer) == "kda":
    rows += KDA + (KDA_FULL_GATE if cfg.use_full_rank_gate else KDA_LOW_RANK_GATE)
  else:
    rows += MLA + (MLA_LOW_RANK_QUERY if cfg.q_lora_rank else MLA_FULL_QUERY)
    rows += MLA_GATE if cfg.mla_use_output_gate else ()
  if cfg.mlp_kind(layer) == "dense":
    return rows + DENSE
  if cfg.routed_expert_hidden_size:
    rows += LATENT + (LATENT_NORM if cfg.latent_moe_use_norm else ())
  return rows + ROUTER + (SHARED if cfg.shared_experts else ())


def _specs(rows: tuple[Row, ...], prefix: str, parent: str, cfg: Config) -> Iterator[TensorSpec]:
  dims = _dims(cfg)
  merged: dict[str, TensorSpec] = {}
  for row in rows:
    shape = _a_log_shape(cfg) if row.shape == "A_log" else tuple(dims[letter] for letter in row.shape.split())
    place = Place(f"{parent}{row.parameter}", row.view, row.lead)
    earlier = merged[row.published].places if row.published in merged else ()
    merged[row.published] = TensorSpec(f"{prefix}{row.published}", shape, row.dtype, (*earlier, place))
  yield from merged.values()


def _expert_specs(
  prefix: str, parent: str, cfg: Config, packed: Callable[[str], bool]
) -> Iterator[TensorSpec]:
  dims, path = _dims(cfg), f"{parent}block_sparse_moe.experts."
  plain, quantized = [], []
  for name, out, inner in EXPERT:
    rows, columns = dims[out], dims[inner]
    plain.append((name, ".weight", (rows, columns), MATRIX, path + name))
    for part, per_byte in (("packed", 2), ("scale", BLOCK)):
      shape = rows, columns // per_byte
      quantized.append((name, f".weight_{part}", shape, U8, f"{path}{name}_{part}"))
  for expert in range(cfg.num_experts):
    stem = f"{prefix}block_sparse_moe.experts.{expert}."
    is_packed = {name: packed(stem + name) for name, *_ in EXPERT}
    for forms, wanted in ((plain, False), (quantized, True)):
      for name, ending, shape, dtype, parameter in forms:
        if is_packed[name] is wanted:
          yield TensorSpec(stem + name + ending, shape, dtype, (Place(parameter, "same", (expert,)),))


def head_prefix(prefix: str) -> str:
  """Returns what stands before `lm_head` when `prefix` stands before the decoder's tensors."""
  return prefix.removesuffix("model.")


def expected_tensors(
  cfg: Config, prefix: str | None = None, packed: Callable[[str], bool] | None = None
) -> Iterator[TensorSpec]:
  """Yields every text tensor that a published checkpoint of `cfg` holds, without allocating any of them.

  Args:
    cfg: the architecture.
    prefix: what stands before `embed_tokens` and `layers`; the family's published prefix when None.
    packed: whether the expert matrix of this stem (name without `.weight`) is stored as MXFP4; what the
      configuration says when None. A loader asks the file, never the published ignore list (spec 1.3, D14).
  """
  prefix = published_prefix(cfg) if prefix is None else prefix
  packed = packed or (lambda stem: cfg.expert_quantization == "mxfp4")
  yield from _specs(TOP + (TOP_ATTN_RES if cfg.attn_res_block_size else ()), prefix, "", cfg)
  if not cfg.logits_via_embedding:
    yield from _specs((HEAD,), head_prefix(prefix), "", cfg)
  for layer in range(cfg.base_num_decoder_layers):
    where, parent = f"{prefix}layers.{layer}.", f"layers.{layer}."
    yield from _specs(layer_rows(cfg, layer), where, parent, cfg)
    if cfg.mlp_kind(layer) == "moe":
      yield from _expert_specs(where, parent, cfg, packed)


def published_prefix(cfg: Config) -> str:
  """Returns the decoder prefix that the family was released with."""
  return "language_model.model." if cfg.model_type == "kimi_k3" else "model."
