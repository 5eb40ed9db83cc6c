"""Reads and writes a published `config.json`: K3's nested form and Kimi-Linear's flat form, without loss.

What the model reads becomes a schema field; everything else rides along in `published_extra`.
Source: spec section 1 (K3) and section 8 (Kimi-Linear).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from MaxText.common.errors import ConfigError, did_you_mean
from MaxText.configs import yaml_text
from MaxText.configs.checking import construct
from MaxText.configs.schema import Config

# published key, below text_config for K3 -> schema field
_KEYS = {
  "vocab_size": "vocab_size",
  "hidden_size": "base_emb_dim",
  "num_hidden_layers": "base_num_decoder_layers",
  "intermediate_size": "base_mlp_dim",
  "hidden_act": "hidden_act",
  "activation_situ_beta": "activation_situ_beta",
  "activation_situ_linear_beta": "activation_situ_linear_beta",
  "attn_res_block_size": "attn_res_block_size",
  "rms_norm_eps": "normalization_layer_epsilon",
  "max_position_embeddings": "max_position_embeddings",
  "tie_word_embeddings": "logits_via_embedding",
  "initializer_range": "initializer_range",
  "num_attention_heads": "base_num_query_heads",
  "q_lora_rank": "q_lora_rank",
  "kv_lora_rank": "kv_lora_rank",
  "qk_nope_head_dim": "qk_nope_head_dim",
  "qk_rope_head_dim": "qk_rope_head_dim",
  "v_head_dim": "v_head_dim",
  "mla_use_nope": "mla_use_nope",
  "mla_use_output_gate": "mla_use_output_gate",
  "mla_norm_eps": "mla_norm_eps",
  "linear_attn_config.full_attn_layers": "full_attn_layers",
  "linear_attn_config.num_heads": "kda_num_heads",
  "linear_attn_config.head_dim": "kda_head_dim",
  "linear_attn_config.short_conv_kernel_size": "short_conv_kernel_size",
  "linear_attn_config.use_full_rank_gate": "use_full_rank_gate",
  "linear_attn_config.gate_lower_bound": "gate_lower_bound",
  "num_experts": "num_experts",
  "num_experts_per_token": "num_experts_per_tok",
  "num_shared_experts": "shared_experts",
  "moe_intermediate_size": "base_moe_mlp_dim",
  "first_k_dense_replace": "first_num_dense_layers",
  "moe_layer_freq": "moe_layer_freq",
  "routed_expert_hidden_size": "routed_expert_hidden_size",
  "latent_moe_use_norm": "latent_moe_use_norm",
  "moe_router_activation_func": "routed_score_func",
  "moe_renormalize": "norm_topk_prob",
  "routed_scaling_factor": "routed_scaling_factor",
  "num_expert_group": "n_routing_groups",
  "topk_group": "topk_routing_group",
}
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

# no part of the architecture, so a file may be silent about them: training start, MLA norm (spec 9-D1)
_OPTIONAL = {"initializer_range": 0.02, "mla_norm_eps": 1e-6}
# keys that K3 added: a kimi_linear file is silent about them, and means this
_KIMI_LINEAR = {
  "activation_situ_beta": None,
  "activation_situ_linear_beta": None,
  "attn_res_block_size": None,
  "mla_use_output_gate": False,
  "linear_attn_config.use_full_rank_gate": False,
  "linear_attn_config.gate_lower_bound": None,
  "routed_expert_hidden_size": None,
  "latent_moe_use_norm": False,
}
# features of neither family: a file that asks for them is refused rather than half obeyed
_FIXED = {"num_nextn_predict_layers": 0, "topk_method": "noaux_tc"}
_ARCHITECTURES = {"kimi_k3": "KimiK3ForConditionalGeneration", "kimi_linear": "KimiLinearForCausalLM"}
_MXFP4 = "mxfp4-pack-quantized"
_MISSING = object()


def from_published(config_json: dict[str, Any], path: str = "config.json") -> Config:
  """Reads a published configuration; the keys of how it runs keep their defaults.

  Args:
    config_json: content of a config.json of model_type kimi_k3 or kimi_linear.
    path: where it came from, for messages and the model's name.

  Raises:
    ConfigError: unknown model_type, missing architecture keys (all are named), or an impossible value.
  """
  return construct(Config, model_keys(config_json, path), key_origins(config_json, path), path)


def model_keys(config_json: dict[str, Any], path: str) -> dict[str, Any]:
  """Returns schema field -> value for a published configuration; see `from_published`."""
  model_type = config_json.get("model_type")
  if model_type not in list(_ARCHITECTURES):  # a list compares; a set would hash what JSON may hold
    hint = did_you_mean(str(model_type), _ARCHITECTURES)
    raise ConfigError(f"{path}: model_type: {model_type!r} is none of {', '.join(_ARCHITECTURES)}{hint}")
  text, prefix = _text_part(config_json, path)
  values = _read_keys(text, prefix, model_type, path)
  for key in _TOKEN_KEYS:
    values[key] = config_json.get(key) if text.get(key) is None else text[key]
  values |= {
    "model_name": Path(path).parent.name or model_type,
    "model_type": model_type,
    "expert_quantization": _expert_quantization(config_json, text, prefix, path),
  }
  construct(
    Config, values, key_origins(config_json, path), path
  )  # types first: what follows computes with them
  _check_supported(text, values, prefix, path)
  values["published_extra"] = _difference(config_json, _rebuild(values))
  return values


def key_origins(config_json: Mapping[str, Any], path: str) -> dict[str, str]:
  """Returns schema field -> "file: published key", for messages about a value."""
  prefix = "text_config." if config_json.get("model_type") == "kimi_k3" else ""
  return {field: f"{path}: {prefix}{key}" for key, field in _KEYS.items()}


def to_published(cfg: Config) -> dict[str, Any]:
  """Returns the config.json of `cfg`: all keys that it was read from, with its present values."""
  values = cfg.model_dump() | {"full_attn_layers": list(cfg.full_attn_layers)}
  extra = cfg.published_extra
  if cfg.expert_quantization == "none":
    extra = _without(extra, "quantization_config")
  return _merge(_rebuild(values), extra)


def write_model_file(cfg: Config, path: Path) -> None:
  """Writes the architecture of `cfg` as a model file; the keys of how it runs stay with base.yml."""
  runs = {name for name, field in Config.model_fields.items() if not field.is_required()}
  keys = cfg.model_dump(exclude=runs - {"mla_norm_eps", "published_extra"})
  if not keys["published_extra"]:
    del keys["published_extra"]
  keys["full_attn_layers"] = list(cfg.full_attn_layers)
  path.write_text(yaml_text.dump({"base_config": "base.yml"} | keys), encoding="utf-8")


# --- reading ------------------------------------------------------------------------------------------------


def _text_part(config_json: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
  if config_json["model_type"] == "kimi_linear":
    return config_json, ""
  text = config_json.get("text_config")
  if not isinstance(text, dict):
    raise ConfigError(f"{path}: missing text_config (kimi_k3 keeps the keys of its decoder there)")
  return text, "text_config."


def _read_keys(text: dict[str, Any], prefix: str, model_type: str, path: str) -> dict[str, Any]:
  silent = _OPTIONAL | (_KIMI_LINEAR if model_type == "kimi_linear" else {})
  # the flat form states the context under its tokenizer's name
  flat = {"max_position_embeddings": "model_max_length"} if model_type == "kimi_linear" else {}
  found = {}
  for key in _KEYS:
    value = _at(text, key)
    if value is _MISSING and key in flat:
      value = _at(text, flat[key])
    found[key] = silent.get(key, _MISSING) if value is _MISSING else value
  missing = [prefix + key for key, value in found.items() if value is _MISSING]
  if missing:
    noun = "key" if len(missing) == 1 else "keys"
    raise ConfigError(f"{path}: missing architecture {noun} {', '.join(missing)} (no default exists)")
  return {_KEYS[key]: value for key, value in found.items()}


def _check_supported(text: dict[str, Any], values: Mapping[str, Any], prefix: str, path: str) -> None:
  wants = _FIXED | _derived(values)
  if values["n_routing_groups"] != 1:
    wants["use_grouped_topk"] = True
  for key, wanted in wants.items():
    given = _at(text, key)
    if given is not _MISSING and given != wanted:
      raise ConfigError(f"{path}: {prefix}{key}: got {given!r}, this model family has {wanted!r}")


def _expert_quantization(config_json: dict[str, Any], text: dict[str, Any], prefix: str, path: str) -> str:
  """MXFP4 names the routed experts only, whatever the file's `targets` and `ignore` say (spec 1.3)."""
  quantization = text.get("quantization_config")
  if quantization is None and text is not config_json and config_json.get("quantization_config") is not None:
    raise ConfigError(f"{path}: quantization_config: kimi_k3 keeps it in text_config")
  if quantization is None:
    return "none"
  form = quantization.get("format") if isinstance(quantization, dict) else quantization
  if form != _MXFP4:
    raise ConfigError(f"{path}: {prefix}quantization_config.format: got {form!r}, expected {_MXFP4!r}")
  return "mxfp4"


# --- writing ------------------------------------------------------------------------------------------------


def _rebuild(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the config.json that the model's own keys imply."""
  is_k3 = values["model_type"] == "kimi_k3"
  text: dict[str, Any] = {"architectures": [_ARCHITECTURES["kimi_linear"]], "model_type": "kimi_linear"}
  for key, field in _KEYS.items():
    silent = _OPTIONAL if is_k3 else _OPTIONAL | _KIMI_LINEAR
    if key not in silent or values[field] != silent[key]:
      _put(text, key, values[field])
  text |= _FIXED | {"use_grouped_topk": True, "dtype": "bfloat16"}
  text["initializer_range"] = values["initializer_range"]
  for key, value in _derived(values).items():
    _put(text, key, value)
  if values["expert_quantization"] == "mxfp4":
    text["quantization_config"] = _quantization_config()
  tokens = {key: values[key] for key in _TOKEN_KEYS}
  if not is_k3:
    return text | tokens | {"model_max_length": values["max_position_embeddings"]}
  outer: dict[str, Any] = {"architectures": [_ARCHITECTURES["kimi_k3"]], "model_type": "kimi_k3"}
  outer |= {"dtype": "bfloat16", "tie_word_embeddings": values["logits_via_embedding"]}
  return outer | tokens | {"text_config": text | tokens}


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
  """Published keys that repeat others."""
  full = values["full_attn_layers"]
  linear = [layer for layer in range(1, values["base_num_decoder_layers"] + 1) if layer not in full]
  return {"num_key_value_heads": values["base_num_query_heads"], "linear_attn_config.kda_layers": linear}


def _quantization_config() -> dict[str, Any]:
  weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
  weights |= {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8"}
  weights |= {"actorder": None, "block_structure": None, "zp_dtype": None}
  group = {"format": _MXFP4, "targets": ["Linear"], "weights": weights}
  group |= {"input_activations": None, "output_activations": None}
  plain = ("self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*", "lm_head.*")
  vision = ("vision_tower.*", "mm_projector.*")
  return {
    "quant_method": "compressed-tensors",
    "format": _MXFP4,
    "quantization_status": "compressed",
    "config_groups": {"group_0": group},
    "ignore": [f"re:.*{name}" for name in plain + vision],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
  }


# --- nested dictionaries ------------------------------------------------------------------------------------


def _at(tree: Any, dotted: str) -> Any:
  for name in dotted.split("."):
    if not isinstance(tree, dict) or name not in tree:
      return _MISSING
    tree = tree[name]
  return tree


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
  *parents, last = dotted.split(".")
  for name in parents:
    tree = tree.setdefault(name, {})
  tree[last] = value


def _difference(given: dict[str, Any], rebuilt: dict[str, Any]) -> dict[str, Any]:
  """Returns what `given` states and `rebuilt` does not."""
  extra = {}
  for key, value in given.items():
    other = rebuilt.get(key, _MISSING)
    if isinstance(value, dict) and isinstance(other, dict):
      if inner := _difference(value, other):
        extra[key] = inner
    elif value != other or type(value) is not type(other):
      extra[key] = value
  return extra


def _merge(rebuilt: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
  merged = dict(rebuilt)
  for key, value in extra.items():
    nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
    merged[key] = _merge(merged[key], value) if nested else value
  return merged


def _without(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
  return {k: _without(v, name) if isinstance(v, dict) else v for k, v in tree.items() if k != name}
