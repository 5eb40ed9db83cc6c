"""Impossible combinations are refused with one line that begins with the key; possible ones are not."""

import pytest

from MaxText.common.errors import ConfigError
from MaxText.configs.loader import load

TINY = "kimi-k3-tiny"


@pytest.mark.parametrize(
  ("overrides", "line"),
  [
    (["full_attn_layers=4,3"], "full_attn_layers: [4, 3] is not strictly increasing"),
    (["full_attn_layers=4,4"], "full_attn_layers: [4, 4] is not strictly increasing"),
    (["full_attn_layers=4,10"], "full_attn_layers: [4, 10] leaves 1..9 (layers count from 1, as published)"),
    (["full_attn_layers=0,4"], "full_attn_layers: [0, 4] leaves 1..9 (layers count from 1, as published)"),
    (["first_num_dense_layers=10"], "first_num_dense_layers: 10 exceeds the depth of 9"),
    (["eos_token_id=1024"], "eos_token_id: 1024 is outside the vocabulary of 1024"),
    (["mla_use_nope=false"], "mla_use_nope: false asks for rotary embeddings"),
    (["gate_lower_bound=-5.1"], "gate_lower_bound: -5.1 is outside [-5, 0)"),
    (["gate_lower_bound=0.0"], "gate_lower_bound: 0.0 is outside [-5, 0)"),
    (["activation_situ_beta=null"], "hidden_act: situ needs activation_situ_beta"),
    (["n_routing_groups=3"], "n_routing_groups: 3 does not divide the 16 experts"),
    (["topk_routing_group=2"], "topk_routing_group: 2 exceeds n_routing_groups 1"),
    (["num_experts_per_tok=17"], "num_experts_per_tok: 17 exceeds the 16 that can be chosen"),
    (["n_routing_groups=8"], "num_experts_per_tok: 4 exceeds the 2 that can be chosen"),
    (["routed_expert_hidden_size=null"], "latent_moe_use_norm: true needs routed_expert_hidden_size"),
    (["base_moe_mlp_dim=80"], "base_moe_mlp_dim: 80 is no multiple of 32"),
    (["routed_expert_hidden_size=80"], "routed_expert_hidden_size: 80 is no multiple of 32"),
    (["attn_res_block_size=0"], "attn_res_block_size: got 0, expected a whole number > 0 or null"),
    (["activation_situ_beta=0"], "activation_situ_beta: got 0, expected a number > 0 or null"),
  ],
)
def test_an_impossible_combination_is_refused(overrides, line):
  with pytest.raises(ConfigError) as caught:
    load(TINY, overrides)
  message = str(caught.value)
  assert line in message and "\n" not in message


def test_a_contradiction_names_who_stated_the_key():
  with pytest.raises(ConfigError, match=r"^command line: gate_lower_bound: -7\.0 is outside"):
    load(TINY, ["gate_lower_bound=-7"])


@pytest.mark.parametrize(
  "overrides",
  [
    ["full_attn_layers="],
    ["gate_lower_bound=null"],
    ["n_routing_groups=4", "topk_routing_group=2"],
    ["expert_quantization=none", "base_moe_mlp_dim=80"],
    ["routed_expert_hidden_size=null", "latent_moe_use_norm=false", "base_emb_dim=160"],
    ["hidden_act=silu", "activation_situ_beta=null", "activation_situ_linear_beta=null"],
    ["attn_res_block_size=null"],
    ["attn_res_block_size=100"],
    ["activation_situ_linear_beta=null"],
    ["shared_experts=0", "qk_rope_head_dim=0"],
  ],
)
def test_a_possible_combination_loads(overrides):
  load(TINY, overrides)


def test_one_expert_with_renormalised_weights_warns(caplog):
  load(TINY, ["num_experts_per_tok=1", "norm_topk_prob=false"])
  assert not caplog.records
  load(TINY, ["num_experts_per_tok=1"])
  assert "no gradient" in caplog.text


def test_layer_kinds_follow_the_published_lists_which_count_from_one():
  cfg = load("kimi-k3")
  mla = [layer for layer in range(93) if cfg.layer_kind(layer) == "mla"]
  assert mla == [*range(3, 92, 4), 92]  # the last two layers are both full attention
  assert [layer for layer in range(93) if cfg.mlp_kind(layer) == "dense"] == [0]


def test_a_configuration_is_frozen_and_hashable_whatever_its_extras():
  cfg = load("kimi-k3")
  assert hash(cfg) == hash(load("kimi-k3")) == hash(cfg.model_copy(update={"published_extra": {}}))
  assert hash(cfg) != hash(cfg.model_copy(update={"num_experts": 8}))
  with pytest.raises(ValueError, match="frozen"):
    cfg.num_experts = 8
