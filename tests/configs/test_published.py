"""config.json becomes a model file and comes back without loss; a key that it lacks is named."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.common.errors import ConfigError
from MaxText.configs.loader import load
from MaxText.configs.published import from_published, to_published, write_model_file
from tests.locations import SHARED

# what K3 adds to Kimi-Linear: a kimi_linear file is silent about these (spec 8)
K3_ONLY = {
  "activation_situ_beta": None,
  "activation_situ_linear_beta": None,
  "attn_res_block_size": None,
  "mla_use_output_gate": False,
  "use_full_rank_gate": False,
  "gate_lower_bound": None,
  "routed_expert_hidden_size": None,
  "latent_moe_use_norm": False,
}
ARCHITECTURE = (
  "vocab_size hidden_size num_hidden_layers intermediate_size hidden_act rms_norm_eps "
  "max_position_embeddings tie_word_embeddings num_attention_heads q_lora_rank kv_lora_rank "
  "qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope num_experts num_experts_per_token "
  "num_shared_experts moe_intermediate_size first_k_dense_replace moe_layer_freq moe_router_activation_func "
  "moe_renormalize routed_scaling_factor num_expert_group topk_group linear_attn_config.full_attn_layers "
  "linear_attn_config.num_heads linear_attn_config.head_dim linear_attn_config.short_conv_kernel_size "
  "activation_situ_beta activation_situ_linear_beta attn_res_block_size mla_use_output_gate "
  "routed_expert_hidden_size latent_moe_use_norm linear_attn_config.use_full_rank_gate "
  "linear_attn_config.gate_lower_bound"
).split()


def shared_json(name: str) -> dict:
  """A file of the shared folder; skips where the folder is absent."""
  path = SHARED / name
  if not path.exists():
    pytest.skip(f"{path} is absent")
  return json.loads(path.read_text())


K3 = to_published(load("kimi-k3"))
KIMI_LINEAR = to_published(load("kimi-linear-48b-a3b"))


def k3() -> dict:
  return copy.deepcopy(K3)


def kimi_linear() -> dict:
  """Kimi-Linear-48B's config.json as published."""
  published = copy.deepcopy(KIMI_LINEAR)
  for ours in ("max_position_embeddings", "topk_method"):
    del published[ours]
  return published


def refusal(config_json: dict) -> str:
  with pytest.raises(ConfigError) as caught:
    from_published(config_json, "ckpt/config.json")
  assert "\n" not in str(caught.value)
  return str(caught.value)


def without(tree: dict, dotted: str) -> dict:
  tree = copy.deepcopy(tree)
  *parents, last = dotted.split(".")
  holder = tree
  for name in parents:
    holder = holder[name]
  del holder[last]
  return tree


def missing(inner: dict, outer: dict) -> list[str]:
  """Keys of `inner` that `outer` lacks or states differently."""
  found = []
  for key, value in inner.items():
    if isinstance(value, dict) and isinstance(outer.get(key), dict):
      found += [f"{key}.{name}" for name in missing(value, outer[key])]
    elif key not in outer or outer[key] != value or type(outer[key]) is not type(value):
      found.append(key)
  return found


# --- round trips -------------------------------------------------------------------------------------------


def test_the_model_file_states_the_published_config_exactly():
  published = shared_json("spec/k3_config.json")
  assert to_published(load("kimi-k3")) == published
  assert from_published(published, "kimi-k3/config.json") == load("kimi-k3")


@pytest.mark.parametrize("make", [k3, kimi_linear])
def test_every_key_survives_a_model_file(make, tmp_path):
  published = make()
  write_model_file(from_published(published, "mine/config.json"), tmp_path / "mine.yml")
  cfg = load(tmp_path / "mine.yml")
  assert cfg == from_published(published, "mine/config.json")
  assert missing(published, to_published(cfg)) == []


def test_the_oracle_survives_and_its_norms_inside_attention_use_1e_6(tmp_path):
  published = shared_json("fixtures/k3-oracle/config.json")
  cfg = from_published(published)
  assert (cfg.mla_norm_eps, cfg.bos_token_id, cfg.pad_token_id) == (1e-6, 0, None)
  write_model_file(cfg, tmp_path / "oracle.yml")
  assert load(tmp_path / "oracle.yml") == cfg
  assert missing(published, to_published(cfg)) == []


def test_a_changed_norm_eps_survives():
  cfg = load("kimi-k3-tiny", ["mla_norm_eps=1e-5"])
  assert from_published(to_published(cfg)).mla_norm_eps == 1e-5


EXTRA = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=4),
  lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
  max_leaves=5,
)


@given(st.dictionaries(st.from_regex(r"x_[a-z]{1,3}", fullmatch=True), EXTRA, max_size=4))
@settings(max_examples=40, deadline=None)
def test_unknown_keys_ride_along_in_every_part(extra):
  published = k3()
  for part in (published, published["text_config"], published["text_config"]["linear_attn_config"]):
    part.update(extra)
  assert to_published(from_published(published)) == published
  flat = kimi_linear() | extra
  assert missing(flat, to_published(from_published(flat))) == []


def test_a_conflict_between_the_two_parts_survives():
  published = k3()
  published["eos_token_id"], published["text_config"]["eos_token_id"] = 163585, None
  assert from_published(published).eos_token_id == 163585
  assert to_published(from_published(published)) == published


def test_export_states_present_values_and_drops_a_quantization_that_is_gone():
  cfg = load("kimi-k3").model_copy(update={"num_experts": 8, "expert_quantization": "none"})
  text = to_published(cfg)["text_config"]
  assert text["num_experts"] == 8 and "quantization_config" not in text


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ARCHITECTURE)
def test_a_lacking_architecture_key_of_k3_is_named_with_its_path(key):
  message = refusal(without(k3(), f"text_config.{key}"))
  assert message == f"ckpt/config.json: missing architecture key text_config.{key} (no default exists)"


def test_all_lacking_keys_are_named_at_once():
  published = without(without(k3(), "text_config.hidden_act"), "text_config.linear_attn_config.head_dim")
  keys = "text_config.hidden_act, text_config.linear_attn_config.head_dim"
  assert f"missing architecture keys {keys} (" in refusal(published)
  assert "missing text_config" in refusal(without(k3(), "text_config"))


def test_a_kimi_linear_file_is_silent_about_what_k3_adds():
  cfg = from_published(kimi_linear())
  assert {name: getattr(cfg, name) for name in K3_ONLY} == K3_ONLY
  assert cfg.max_position_embeddings == 1048576


@pytest.mark.parametrize(
  "key", [key for key in ARCHITECTURE if key.split(".")[-1] not in {*K3_ONLY, "max_position_embeddings"}]
)
def test_a_lacking_architecture_key_of_kimi_linear_is_named(key):
  assert f"missing architecture key {key} (" in refusal(without(kimi_linear(), key))


@pytest.mark.parametrize(
  ("model_type", "hint"),
  [("kimi_k33", ", did you mean 'kimi_k3'?"), ("bailing_moe", ""), (None, ""), ([1], "")],
)
def test_an_unknown_model_type_is_refused_whatever_else_it_states(model_type, hint):
  message = refusal(kimi_linear() | {"model_type": model_type})
  line = f"ckpt/config.json: model_type: {model_type!r} is none of kimi_k3, kimi_linear{hint}"
  assert message == line


@pytest.mark.parametrize(
  ("change", "line"),
  [
    (
      {"hidden_size": "wide"},
      "text_config.hidden_size: base_emb_dim: got 'wide', expected a whole number > 0",
    ),
    ({"num_hidden_layers": None}, "text_config.num_hidden_layers: base_num_decoder_layers: got None"),
    ({"num_key_value_heads": 8}, "text_config.num_key_value_heads: got 8, this model family has 96"),
    ({"num_nextn_predict_layers": 1}, "text_config.num_nextn_predict_layers: got 1, this model family has 0"),
    ({"topk_method": "greedy"}, "text_config.topk_method: got 'greedy', this model family has 'noaux_tc'"),
    ({"num_expert_group": 2, "use_grouped_topk": False}, "text_config.use_grouped_topk: got False"),
    ({"mla_use_nope": False}, "text_config.mla_use_nope: mla_use_nope: false asks for rotary embeddings"),
    (
      {"quantization_config": {"format": "nvfp4"}},
      "quantization_config.format: got 'nvfp4', expected 'mxfp4",
    ),
    ({"quantization_config": "fp8"}, "quantization_config.format: got 'fp8', expected 'mxfp4"),
    (
      {"linear_attn_config": None},
      "missing architecture keys text_config.linear_attn_config.full_attn_layers",
    ),
  ],
)
def test_a_value_that_cannot_be_obeyed_is_refused(change, line):
  published = k3()
  published["text_config"].update(change)
  assert line in refusal(published)


def test_layer_lists_that_disagree_are_refused():
  published = k3()
  published["text_config"]["linear_attn_config"]["kda_layers"][-1] = 92
  assert "text_config.linear_attn_config.kda_layers: got" in refusal(published)


def test_quantization_is_read_from_the_text_part_only():
  published = k3()
  published["quantization_config"] = published["text_config"].pop("quantization_config")
  assert refusal(published).endswith("quantization_config: kimi_k3 keeps it in text_config")
  del published["quantization_config"]
  assert from_published(published).expert_quantization == "none"
  assert from_published(k3()).expert_quantization == "mxfp4"
