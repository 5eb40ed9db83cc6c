"""Seeded checkpoints of both families in the published layout, small for tests or large for timing.

Every tensor is drawn from its own stream (seed, name), written, and forgotten: the peak is one tensor, and
a packed and a plain checkpoint of one seed hold the same values. Weights are scaled by fan-in; keys of
different tokens are correlated; decay gates reach from about -5 (fast) to -1e-3 (slow) a token; the router's
bias changes selections; the latents and one KDA head are faint enough for a wrong eps to show.
Source: spec section 3 (names, shapes, dtypes), 3.1 (MXFP4), 5 (vision), 8 (Kimi-Linear).
"""

import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.reference import ops
from tests.reference.tensors import TensorPlan, write_directory

F32, U8 = np.dtype(np.float32), np.dtype(np.uint8)
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": F32}
LM_HEAD_GAIN = 3.0  # spreads the logits so that float32 rounding cannot flip a greedy choice
FAINT = 0.1  # some norms get inputs this small, so that the place and the size of their eps can be seen


def write_checkpoint(
  directory: str | Path,
  config_json: dict,
  seed: int,
  *,
  shards: int = 1,
  packed: bool | None = None,
  prefix: str | None = None,
  conv_rank: int = 3,
  a_log_width: int | None = None,
  vision: bool = False,
  dtype: str = "bf16",
) -> Path:
  """Writes config.json and safetensors files that a published checkpoint could have.

  Args:
    directory: created if absent.
    config_json: of either function below; its quantisation and dtype keys are set here.
    seed: same seed, same values, whatever the layout options.
    shards: number of safetensors files; more than one come with an index.
    packed: routed experts as MXFP4 bytes; None means packed for K3, plain for Kimi-Linear.
    prefix: of every text tensor; None means the family's published one.
    conv_rank: 3 stores convolutions [C, 1, W] as published, 2 stores [C, W].
    a_log_width: stored width of K3's A_log, padded with zeros; None means one value a head.
    vision: adds a few vision and projector tensors and a vision_config.
    dtype: "bf16" or "f32" for matrices and norms; what the release keeps in float32 stays float32.

  Returns:
    The directory.
  """
  directory, nested = Path(directory), "text_config" in config_json
  packed = nested if packed is None else packed
  prefix = ("language_model." if nested else "") if prefix is None else prefix
  config_json = _described(config_json, packed=packed, vision=vision, dtype=dtype)
  draw = _Drawer(config_json.get("text_config", config_json), seed, DTYPES[dtype], prefix)
  plans = list(draw.model(packed=packed, conv_rank=conv_rank, a_log_width=a_log_width))
  if vision:
    plans += draw.vision(config_json["vision_config"])
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(config_json, indent=2))
  write_directory(directory, plans, shards)
  return directory


def k3_config_json(**overrides) -> dict:
  """A small Kimi K3 configuration in the published nested form.

  Args:
    **overrides: any published key of the text part, of `linear_attn_config` or of the top level, and
      `kda_heads` and `kda_head_dim`. `kda_layers` always follows from `full_attn_layers`.
  """
  text = _common_text(overrides) | {
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "q_lora_rank": 24,
    "mla_use_output_gate": True,
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "max_position_embeddings": 4096,
  }
  text["linear_attn_config"] |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
  special = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
  top = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    **special,
    "tie_word_embeddings": False,
    "text_config": text,
  }
  return _overridden(top, overrides)


def kimi_linear_config_json(**overrides) -> dict:
  """A small Kimi-Linear configuration in the published flat form; see `k3_config_json` for the overrides."""
  text = _common_text(overrides) | {
    "hidden_act": "silu",
    "head_dim": 24,
    "q_lora_rank": None,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "model_max_length": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
  }
  return _overridden(text, overrides)


def _common_text(overrides: dict) -> dict:
  layers = overrides.get("num_hidden_layers", 9)
  full = list(overrides.get("full_attn_layers", [*range(4, layers, 4), layers]))
  return {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": layers,
    "num_attention_heads": 4,
    "num_key_value_heads": overrides.get("num_attention_heads", 4),
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "mla_use_nope": True,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 96,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 93,
    "eos_token_id": 94,
    "pad_token_id": 95,
    "linear_attn_config": {
      "num_heads": overrides.get("kda_heads", 3),
      "head_dim": overrides.get("kda_head_dim", 16),
      "short_conv_kernel_size": 4,
      "full_attn_layers": full,
      "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
    },
  }


def _overridden(config: dict, overrides: dict) -> dict:
  text = config.get("text_config", config)
  for key, value in overrides.items():
    if key in ("kda_heads", "kda_head_dim"):
      continue
    holders = [part for part in (text, text["linear_attn_config"], config) if key in part]
    if not holders:
      raise KeyError(f"no published key {key!r}")
    holders[0][key] = list(value) if isinstance(value, tuple) else value
  return config


def _described(config_json: dict, *, packed: bool, vision: bool, dtype: str) -> dict:
  """A copy of `config_json` that states how the tensors are stored."""
  config_json = copy.deepcopy(config_json)
  text = config_json.get("text_config", config_json)
  config_json["dtype"] = text["dtype"] = {"bf16": "bfloat16", "f32": "float32"}[dtype]
  text.pop("quantization_config", None)
  if packed:
    group = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
    group |= {"dynamic": False, "scale_dtype": "torch.uint8"}
    attention, shared, dense = (
      "re:.*self_attn.*",
      "re:.*shared_experts.*",
      r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    )
    text["quantization_config"] = {
      "quant_method": "compressed-tensors",
      "format": "mxfp4-pack-quantized",
      "quantization_status": "compressed",
      "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
      "ignore": [attention, shared, dense, "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"],
    }
  if vision:
    config_json["vision_config"] = {"patch_size": 14, "vt_num_hidden_layers": 1, "vt_hidden_size": 8}
  return config_json


class _Drawer:
  """Plans every tensor of one checkpoint."""

  def __init__(self, cfg: dict, seed: int, dtype: np.dtype, prefix: str):
    self.cfg, self.linear_cfg = cfg, cfg["linear_attn_config"]
    self.seed, self.dtype, self.prefix = seed, dtype, prefix
    self.attn_res = bool(cfg.get("attn_res_block_size"))

  def model(self, *, packed: bool, conv_rank: int, a_log_width: int | None) -> Iterator[TensorPlan]:
    """All text tensors, layer by layer, in the order of the release."""
    cfg = self.cfg
    D, vocab = cfg["hidden_size"], cfg["vocab_size"]
    for layer in range(cfg["num_hidden_layers"]):
      yield from self._layer(f"model.layers.{layer}.", layer, packed, conv_rank, a_log_width)
    yield self._plan("model.embed_tokens.weight", (vocab, D), self._embedding)
    yield self._norm("model.norm.weight", D)
    if self.attn_res:
      yield from self._mixer("model.output_attn_res", D)
    if not cfg["tie_word_embeddings"]:
      yield self._matrix("lm_head.weight", vocab, D, gain=LM_HEAD_GAIN)

  def vision(self, vision_cfg: dict) -> list[TensorPlan]:
    """A few tensors with the published vision names; no text model reads them."""
    width, D = vision_cfg["vt_hidden_size"], self.cfg["hidden_size"]
    shapes = {
      "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
      "vision_tower.encoder.blocks.0.wqkv.weight": (3 * width, width),
      "vision_tower.encoder.final_layernorm.weight": (width,),
      "mm_projector.proj.0.weight": (4 * width, 4 * width),
      "mm_projector.proj.2.weight": (D, 4 * width),
      "mm_projector.post_norm.weight": (D,),
    }
    return [
      TensorPlan(name, shape, self.dtype, lambda n=name, s=shape: 0.1 * self._rng(n).standard_normal(s))
      for name, shape in shapes.items()
    ]

  def _layer(self, p: str, layer: int, packed: bool, conv_rank: int, a_log_width: int | None):
    cfg, D = self.cfg, self.cfg["hidden_size"]
    yield self._norm(p + "input_layernorm.weight", D)
    yield self._norm(p + "post_attention_layernorm.weight", D)
    if self.attn_res:
      yield from self._mixer(p + "self_attention_res", D)
      yield from self._mixer(p + "mlp_res", D)
    if layer + 1 in self.linear_cfg["full_attn_layers"]:
      yield from self._mla(p + "self_attn.")
    else:
      yield from self._kda(p + "self_attn.", conv_rank, a_log_width)
    if layer < cfg["first_k_dense_replace"] or layer % cfg["moe_layer_freq"]:
      yield from self._mlp(p + "mlp.", cfg["intermediate_size"])
    else:
      yield from self._moe(p + "block_sparse_moe.", packed)

  def _kda(self, p: str, conv_rank: int, a_log_width: int | None) -> Iterator[TensorPlan]:
    D, H, K = self.cfg["hidden_size"], self.linear_cfg["num_heads"], self.linear_cfg["head_dim"]
    width = self.linear_cfg["short_conv_kernel_size"]
    key = self._matrix(p + "k_proj.weight", H * K, D)
    yield self._plan(p + "q_proj.weight", key.shape, lambda rng: _query_rows(rng, key.draw()))
    yield key
    yield self._matrix(p + "v_proj.weight", H * K, D)
    yield self._matrix(p + "o_proj.weight", D, H * K)
    yield self._matrix(p + "b_proj.weight", H, D)
    gates = ["f"] if self.linear_cfg.get("use_full_rank_gate") else ["f", "g"]
    for name in gates:
      yield self._matrix(f"{p}{name}_a_proj.weight", K, D)
      yield self._matrix(f"{p}{name}_b_proj.weight", H * K, K)
    if gates == ["f"]:
      yield self._matrix(p + "g_proj.weight", H * K, D)
    shape = (H * K, 1, width) if conv_rank == 3 else (H * K, width)
    for name in ("q", "k", "v"):
      faint = 0 if name == "v" else K
      yield self._plan(f"{p}{name}_conv1d.weight", shape, lambda rng, n=faint: _taps(rng, shape, n), F32)
    flat = self.linear_cfg.get("gate_lower_bound") is not None
    a_shape = (a_log_width or H,) if flat else (1, 1, H, 1)
    yield self._plan(p + "A_log", a_shape, lambda rng: _padded(_speeds(H), a_shape), F32)
    yield self._plan(p + "dt_bias", (H * K,), lambda rng: _gate_bias(rng, H, K), F32)
    yield self._norm(p + "o_norm.weight", K, F32)

  def _mla(self, p: str) -> Iterator[TensorPlan]:
    cfg, D, H = self.cfg, self.cfg["hidden_size"], self.cfg["num_attention_heads"]
    R, N, P, V = (cfg[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = cfg["q_lora_rank"]
    if rank is None:
      yield self._matrix(p + "q_proj.weight", H * (N + P), D, gain=2.0)
    else:
      yield self._matrix(p + "q_a_proj.weight", rank, D, gain=FAINT)
      yield self._norm(p + "q_a_layernorm.weight", rank)
      yield self._matrix(p + "q_b_proj.weight", H * (N + P), rank, gain=2.0)
    yield self._plan(p + "kv_a_proj_with_mqa.weight", (R + P, D), lambda rng: _latent_rows(rng, R, P, D))
    yield self._norm(p + "kv_a_layernorm.weight", R)
    yield self._matrix(p + "kv_b_proj.weight", H * (N + V), R)
    if cfg.get("mla_use_output_gate"):
      yield self._matrix(p + "g_proj.weight", H * V, D)
    yield self._matrix(p + "o_proj.weight", D, H * V)

  def _moe(self, p: str, packed: bool) -> Iterator[TensorPlan]:
    cfg, D = self.cfg, self.cfg["hidden_size"]
    E, F, L = cfg["num_experts"], cfg["moe_intermediate_size"], cfg.get("routed_expert_hidden_size")
    yield self._matrix(p + "gate.weight", E, D, gain=1.5)
    bias = lambda rng: rng.uniform(-0.3, 0.3, E)  # noqa: E731
    yield self._plan(p + "gate.e_score_correction_bias", (E,), bias, F32)
    if L:
      yield self._matrix(p + "routed_expert_down_proj.weight", L, D)
      if cfg["latent_moe_use_norm"]:
        yield self._norm(p + "routed_expert_norm.weight", L)
      yield self._matrix(p + "routed_expert_up_proj.weight", D, L, gain=0.5)
    if cfg["num_shared_experts"]:
      yield from self._mlp(p + "shared_experts.", cfg["num_shared_experts"] * F)
    for e in range(E):
      for name, shape in {"w1": (F, L or D), "w2": (L or D, F), "w3": (F, L or D)}.items():
        yield from self._expert(f"{p}experts.{e}.{name}.", shape, packed)

  def _expert(self, p: str, shape: tuple[int, int], packed: bool) -> Iterator[TensorPlan]:
    out, fan_in = shape
    if packed:
      yield self._plan(p + "weight_packed", (out, fan_in // 2), lambda rng: _mxfp4(rng, shape)[0], U8)
      yield self._plan(p + "weight_scale", (out, fan_in // 32), lambda rng: _mxfp4(rng, shape)[1], U8)
    elif fan_in % 32:
      yield self._matrix(p + "weight", out, fan_in)
    else:
      yield self._plan(p + "weight", shape, lambda rng: ops.decode_mxfp4(*_mxfp4(rng, shape)))

  def _mlp(self, p: str, width: int) -> Iterator[TensorPlan]:
    D = self.cfg["hidden_size"]
    yield self._matrix(p + "gate_proj.weight", width, D)
    yield self._matrix(p + "up_proj.weight", width, D)
    yield self._matrix(p + "down_proj.weight", D, width)

  def _mixer(self, name: str, D: int) -> Iterator[TensorPlan]:
    yield self._norm(f"{name}_norm.weight", D)
    yield self._matrix(f"{name}_proj.weight", 1, D)

  def _norm(self, name: str, width: int, dtype: np.dtype | None = None) -> TensorPlan:
    return self._plan(name, (width,), lambda rng: 1.0 + 0.2 * rng.standard_normal(width), dtype)

  def _matrix(self, name: str, out: int, fan_in: int, gain: float = 1.0) -> TensorPlan:
    scale = np.float32(gain * fan_in**-0.5)
    return self._plan(name, (out, fan_in), lambda rng: scale * rng.standard_normal((out, fan_in), np.float32))

  def _embedding(self, rng: np.random.Generator) -> np.ndarray:
    """Rows that share a direction, so that the keys of different tokens are correlated."""
    shape = self.cfg["vocab_size"], self.cfg["hidden_size"]
    return rng.standard_normal(shape, np.float32) + rng.standard_normal(shape[1], np.float32)

  def _plan(
    self, name: str, shape: tuple[int, ...], draw: Callable, dtype: np.dtype | None = None
  ) -> TensorPlan:
    # both halves of a packed expert, and its plain form, come from one stream
    stream = name.removesuffix("_packed").removesuffix("_scale")
    return TensorPlan(self.prefix + name, shape, dtype or self.dtype, lambda: draw(self._rng(stream)))

  def _rng(self, stream: str) -> np.random.Generator:
    return np.random.default_rng([self.seed, zlib.crc32(stream.encode())])


def _query_rows(rng: np.random.Generator, key: np.ndarray) -> np.ndarray:
  """q_proj that half agrees with k_proj: a read that misses every key leaves the output norm only noise."""
  own = key.shape[1] ** -0.5 * rng.standard_normal(key.shape)
  return 0.8 * key + 0.6 * own


def _taps(rng: np.random.Generator, shape: tuple[int, ...], faint: int) -> np.ndarray:
  """Convolution taps that favour the current token but read all; the first `faint` channels are weak."""
  taps = 0.5 * rng.standard_normal(shape)
  taps[..., -1] += 1.0
  taps[:faint] *= FAINT
  return taps


def _latent_rows(rng: np.random.Generator, rank: int, tail: int, width: int) -> np.ndarray:
  """kv_a_proj_with_mqa: faint rows for the normed latent, full ones for the tail that no norm reads."""
  rows = width**-0.5 * rng.standard_normal((rank + tail, width))
  rows[:rank] *= FAINT
  return rows


def _speeds(heads: int) -> np.ndarray:
  """A_log of each head: K3's published range, about -0.5 to 1.0."""
  return np.linspace(-0.47, 1.0, heads)


def _gate_bias(rng: np.random.Generator, heads: int, width: int) -> np.ndarray:
  """dt_bias whose bounded gate reaches from -5 (fast) to -1e-3 (slow) within every head."""
  target = np.stack([rng.permutation(np.linspace(-8.0, 6.0, width)) for _ in range(heads)])
  return (target / np.exp(_speeds(heads))[:, None]).reshape(-1)


def _padded(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  out = np.zeros(int(np.prod(shape)))
  out[: len(values)] = values
  return out.reshape(shape)


def _mxfp4(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
  """Random codes with block scales whose values have the fan-in's variance, about."""
  out, fan_in = shape
  packed = rng.integers(0, 256, (out, fan_in // 2), np.uint8)
  centre = 127 + round(np.log2(fan_in**-0.5 / np.sqrt(np.mean(ops.E2M1**2))))
  scale = rng.integers(centre - 1, centre + 2, (out, fan_in // 32)).astype(np.uint8)
  return packed, scale
