"""The name tables against the published checkpoints, from a configuration alone (spec 3, 6, 8)."""

import math
from collections import Counter

import numpy as np
import pytest

from MaxText.checkpoints import names
from MaxText.checkpoints.names import expected_tensors
from MaxText.configs.loader import load
from tests.checkpoints.samples import K3
from tests.small import k3_config

BYTES = {"BF16": 2, "F32": 4, "U8": 1}
VISION_BYTES = 2 * (401_214_464 + 46_144_512)


@pytest.fixture(scope="module")
def k3_tensors():
  return {spec.name: spec for spec in expected_tensors(load("kimi-k3"))}


def test_kimi_k3_has_the_published_count_bytes_and_parameters(k3_tensors):
  stored = Counter()
  for spec in k3_tensors.values():
    stored[spec.dtype] += math.prod(spec.shape) * BYTES[spec.dtype]
  assert len(k3_tensors) == 497_220 - 168 == 497_052
  assert sum(stored.values()) == 1_560_860_324_864 - VISION_BYTES
  assert round(stored["U8"] / 2**30, 2) == 1347.12
  codes = sum(math.prod(s.shape) for s in k3_tensors.values() if s.name.endswith("packed"))
  plain = sum(math.prod(s.shape) for s in k3_tensors.values() if s.dtype != "U8")
  assert 2 * codes + plain == 2_779_484_478_208  # A_log with its stored padding


KDA_LAYER = "language_model.model.layers.90.self_attn."
MLA_LAYER = "language_model.model.layers.92.self_attn."
MOE = "language_model.model.layers.1.block_sparse_moe."


@pytest.mark.parametrize(
  "name, shape, dtype",
  [
    ("language_model.model.embed_tokens.weight", (163840, 7168), "BF16"),
    ("language_model.lm_head.weight", (163840, 7168), "BF16"),
    ("language_model.model.output_attn_res_proj.weight", (1, 7168), "BF16"),
    ("language_model.model.layers.0.self_attention_res_proj.weight", (1, 7168), "BF16"),
    ("language_model.model.layers.0.mlp.down_proj.weight", (7168, 33792), "BF16"),
    (KDA_LAYER + "g_proj.weight", (12288, 7168), "BF16"),
    (KDA_LAYER + "f_b_proj.weight", (12288, 128), "BF16"),
    (KDA_LAYER + "k_conv1d.weight", (12288, 1, 4), "F32"),
    (KDA_LAYER + "A_log", (128,), "F32"),
    (KDA_LAYER + "dt_bias", (12288,), "F32"),
    (KDA_LAYER + "o_norm.weight", (128,), "F32"),
    (MLA_LAYER + "q_b_proj.weight", (18432, 1536), "BF16"),
    (MLA_LAYER + "kv_a_proj_with_mqa.weight", (576, 7168), "BF16"),
    (MLA_LAYER + "kv_b_proj.weight", (24576, 512), "BF16"),
    (MOE + "gate.e_score_correction_bias", (896,), "F32"),
    (MOE + "routed_expert_down_proj.weight", (3584, 7168), "BF16"),
    (MOE + "shared_experts.down_proj.weight", (7168, 6144), "BF16"),
    (MOE + "experts.895.w3.weight_packed", (3072, 1792), "U8"),
    (MOE + "experts.895.w2.weight_packed", (3584, 1536), "U8"),
    (MOE + "experts.895.w2.weight_scale", (3584, 96), "U8"),
  ],
)
def test_kimi_k3_has_the_published_tensor(k3_tensors, name, shape, dtype):
  assert (k3_tensors[name].shape, k3_tensors[name].dtype) == (shape, dtype)


def test_kimi_k3_packs_the_routed_experts_and_nothing_else(k3_tensors):
  packed = [name for name in k3_tensors if name.endswith(".weight_packed")]
  assert len(packed) == 92 * 896 * 3 and all(".experts." in name for name in packed)


def test_the_last_two_layers_of_kimi_k3_are_full_attention(k3_tensors):
  full = {int(n.split(".")[3]) + 1 for n in k3_tensors if n.endswith("kv_b_proj.weight")}
  assert full == {*range(4, 93, 4), 93}


def test_kimi_linear_has_the_published_names():
  specs = {spec.name: spec for spec in expected_tensors(load("kimi-linear-48b-a3b"))}
  kda, mla, moe = 15, 5, 2 + 3 + 3 * 256
  assert len(specs) == 3 + 27 * 2 + 20 * kda + 7 * mla + 3 + 26 * moe
  attention = "model.layers.0.self_attn."
  assert specs[attention + "A_log"].shape == (1, 1, 32, 1)
  assert specs[attention + "g_b_proj.weight"].shape == (4096, 128)
  assert specs["model.layers.26.self_attn.q_proj.weight"].shape == (6144, 2304)
  assert specs["model.layers.26.block_sparse_moe.experts.255.w2.weight"].shape == (2304, 1024)
  assert "lm_head.weight" in specs and not any("_res_" in name for name in specs)


@pytest.mark.parametrize("prefix", names.PREFIXES)
def test_the_head_stands_beside_the_decoder(prefix):
  found = [spec.name for spec in expected_tensors(k3_config(), prefix)]
  assert f"{prefix}embed_tokens.weight" in found
  assert f"{prefix.removesuffix('model.')}lm_head.weight" in found


def test_a_view_writes_where_it_reads():
  cfg = k3_config()
  for spec in expected_tensors(cfg):
    array = np.zeros(spec.shape, np.int8)
    for place in spec.places:
      names.view(place.view, array, cfg)[...] += 1
    live = cfg.kda_num_heads if spec.places[0].view == "heads" else array.size
    assert (array.reshape(-1)[:live] == 1).all() and not array.reshape(-1)[live:].any(), spec.name


def test_keys_come_before_values_in_each_head():
  cfg = k3_config()
  H, N, V, R = cfg.base_num_query_heads, cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank
  kv_b = np.arange(H * (N + V) * R).reshape(-1, R)
  second_head = (N + V) * R
  assert names.view("key_rows", kv_b, cfg)[1, 0, 0] == second_head
  assert names.view("value_rows", kv_b, cfg)[1, 0, 0] == second_head + N * R


def test_a_model_without_options_has_none_of_their_tensors():
  cfg = k3_config(
    {"routed_expert_hidden_size": None, "latent_moe_use_norm": False, "num_shared_experts": 0},
    mla_use_output_gate=False,
    q_lora_rank=None,
    logits_via_embedding=True,
  )
  found = " ".join(spec.name for spec in expected_tensors(cfg))
  for absent in ("routed_expert", "shared_experts", "lm_head", "q_a_proj"):
    assert absent not in found
  assert K3["text_config"]["routed_expert_hidden_size"]
