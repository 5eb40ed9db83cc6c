"""The float64 operations against a public port's operator fixtures and the spec's unit values."""

import numpy as np
import pytest

from tests.locations import OPS
from tests.reference import ops
from tests.reference.model import Reference

EPS = 1e-5  # of every norm in these fixtures, the MLA norms included

needs_fixtures = pytest.mark.skipif(not OPS.is_dir(), reason=f"operator fixtures absent: {OPS}")


def fixture(name: str) -> dict[str, np.ndarray]:
  """Arrays of one fixture, in float64 where they are real, without the batch axis of one."""
  arrays = {}
  for key, array in np.load(OPS / f"{name}.npz").items():
    array = array.astype(np.float64) if array.dtype == np.float32 else array
    arrays[key] = array[0] if key in ("in", "out", "in_next", "out_next") and array.ndim == 3 else array
  return arrays


def assert_near(got: np.ndarray, want: np.ndarray):
  """Equal to 1e-5 of the largest value: the fixtures are float32 throughout."""
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))


def layer(weights: dict[str, np.ndarray], **cfg) -> Reference:
  """A reference that holds only the given tensors."""
  reference = object.__new__(Reference)
  reference.cfg = {
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
  } | cfg
  reference.linear_cfg = cfg.get("linear_attn_config")
  reference.eps, reference.mla_norm_eps, reference.l2_eps = EPS, EPS, 1e-6
  reference.dtype, reference._tensors = np.float64, weights
  return reference


def kda_layer(weights: dict[str, np.ndarray]) -> Reference:
  linear = {"num_heads": 4, "head_dim": 16, "gate_lower_bound": -5.0, "use_full_rank_gate": True}
  return layer(weights, linear_attn_config={**linear, "full_attn_layers": []})


def moe_weights(f: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
  """Published names for the tensors that the fixture names its own way."""
  published = {
    "gate.weight": "gate_weight",
    "gate.e_score_correction_bias": "e_score_correction_bias",
    "routed_expert_down_proj.weight": "down_weight",
    "routed_expert_up_proj.weight": "up_weight",
    "routed_expert_norm.weight": "norm_weight",
  }
  shared = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
  published |= {f"shared_experts.{name}.weight": f"shared_{own}_weight" for name, own in shared.items()}
  for e in range(8):
    published |= {f"experts.{e}.{w}.weight": f"experts_{e}_{w}_weight" for w in ("w1", "w2", "w3")}
  return {name: f[prefix + own] for name, own in published.items()}


MOE = {
  "num_experts_per_token": 2,
  "num_expert_group": 1,
  "topk_group": 1,
  "moe_router_activation_func": "sigmoid",
  "moe_renormalize": True,
  "routed_scaling_factor": 1.0,
  "routed_expert_hidden_size": 64,
  "latent_moe_use_norm": True,
  "num_shared_experts": 2,
  "first_k_dense_replace": 1,
  "moe_layer_freq": 1,
}


@needs_fixtures
def test_rms_norm():
  f = fixture("rmsnorm")
  assert_near(ops.rms_norm(f["in"], f["weight"], EPS), f["out"])


@needs_fixtures
def test_situ():
  f = fixture("situ_glu")
  gate, up = np.split(f["in"], 2, axis=-1)
  assert_near(ops.situ(gate, up, 4.0, 25.0), f["out"])


@needs_fixtures
def test_depth_mix():
  f = fixture("attnres")
  sources = [*f["block_residual"].swapaxes(0, 1), f["prefix_sum"]]
  out = ops.depth_mix(sources, f["norm_weight"], f["proj_weight"], EPS)
  assert_near(out, f["out"])


@needs_fixtures
def test_short_conv_continues_over_its_window():
  f = fixture("shortconv")
  whole = ops.short_conv(np.concatenate([f["in"], f["in_next"]]), f["weight"][:, 0])
  assert_near(whole, np.concatenate([f["out"], f["out_next"]]))


@needs_fixtures
def test_decay_gate():
  f = fixture("kda_decay")
  gate = ops.decay_gate(f["z"].reshape(4, 4, 16), f["A_log"], f["dt_bias"].reshape(4, 16), -5.0)
  assert_near(gate, f["g"][0])


@needs_fixtures
@pytest.mark.parametrize("name", ["kda_recur1", "kda_recur8"])
def test_delta_rule(name):
  f = fixture(name)
  q, k, v = (np.load(OPS / f"{name}.npz")[key].astype(np.float64) for key in "qkv")
  out, state = ops.delta_rule(q * f["q_scale"], k, v, np.log(f["alpha"]), f["beta"])
  assert_near(out, np.load(OPS / f"{name}.npz")["out"])
  assert_near(state, f["state_out"])


@needs_fixtures
def test_kda_layer():
  f = fixture("kda_layer8")
  renamed = {
    "f_a": "f_a_proj",
    "f_b": "f_b_proj",
    "q_conv": "q_conv1d",
    "k_conv": "k_conv1d",
    "v_conv": "v_conv1d",
  }
  weights = {f"{renamed.get(name, name)}.weight": array for name, array in f.items()}
  weights |= {"A_log": f["A_log"], "dt_bias": f["dt_bias"]}
  assert_near(kda_layer(weights).kda("", f["in"]), f["out"])


@needs_fixtures
def test_mla_layer():
  f = fixture("mla")
  weights = {f"{name.removesuffix('_weight')}.weight": array for name, array in f.items()}
  dims = {"num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 16}
  dims |= {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "mla_use_output_gate": True}
  assert_near(layer(weights, **dims).mla("", f["in"]), f["out"])


@needs_fixtures
def test_router():
  f = fixture("router")
  weights = {"gate.weight": f["gate_weight"], "gate.e_score_correction_bias": f["bias"]}
  experts, chosen = layer(weights, **MOE).route("", f["in"])
  np.testing.assert_array_equal(experts, f["topk_idx"])
  assert_near(chosen, f["topk_weight"])


@needs_fixtures
def test_moe_block():
  f = fixture("moe")
  assert_near(layer(moe_weights(f, ""), **MOE).moe("", f["in"]), f["out"])


@needs_fixtures
def test_whole_layer_with_kda_and_attn_res():
  f = fixture("layer_kda")
  p = "model.layers.1."
  weights = {f"{p}block_sparse_moe.{name}": array for name, array in moe_weights(f, "mlp_").items()}
  weights |= {f"{p}self_attn.{name}": f[f"self_attn_{name}"] for name in ("A_log", "dt_bias")}
  for name, array in f.items():
    stem = name.removesuffix("_weight")
    if stem.startswith("self_attn_"):
      weights[f"{p}self_attn.{stem.removeprefix('self_attn_')}.weight"] = array
    elif stem.endswith(("layernorm", "res_norm", "res_proj")):
      weights[f"{p}{stem}.weight"] = array
  reference = kda_layer(weights)
  reference.cfg |= MOE
  blocks = list(f["block_residual_in"].swapaxes(0, 1))
  h = reference._mix(f"{p}self_attention_res", blocks, f["in"])
  prefix = f["in"] + reference.attention(1, reference._norm(1, "input_layernorm", h))
  h = reference._mix(f"{p}mlp_res", blocks, prefix)
  out = prefix + reference.feed_forward(1, reference._norm(1, "post_attention_layernorm", h))
  assert_near(out, f["out"])


@needs_fixtures
def test_mxfp4_bytes_of_the_release():
  f = fixture("mxfp4")
  np.testing.assert_array_equal(ops.decode_mxfp4(f["packed"], f["scales"]), f["expected"])


def test_situ_caps_both_branches():
  pairs = np.array([(1, 1), (-3, 50), (100, 100), (2, -30), (8, 8), (-10, 10)], dtype=np.float64)
  expected = [0.71581783, -2.90389147, 99.93292997, -33.93236367, 29.82731488, -0.00170180]
  np.testing.assert_allclose(ops.situ(pairs[:, 0], pairs[:, 1], 4.0, 25.0), expected, rtol=0, atol=5e-9)
  np.testing.assert_allclose(
    ops.situ(pairs[:, 0], 2 * pairs[:, 1], 4.0, None)[0], 2 * ops.situ(1.0, 1.0, 4.0, None)
  )


def test_decay_gate_values():
  a_log = np.array([0.0, 0.0, 0.0, np.log(16.0), 1.0066])
  z = np.array([0.0, 1.0, -1.0, 0.25, -0.3])[None, :, None]
  expected = [-2.5, -3.65529289, -1.34470711, -4.91006895, -1.52787964]
  gate = ops.decay_gate(z, a_log, np.zeros((5, 1)), -5.0)
  np.testing.assert_allclose(gate.reshape(-1), expected, rtol=0, atol=5e-9)


def test_weights_come_from_unbiased_scores():
  scores = np.array([[0.9, 0.8, 0.1]])
  experts = ops.select_experts(scores + [0, -1, 1], 2, 1, 1)
  assert set(experts[0]) == {0, 2}
  order = np.argsort(experts[0])
  np.testing.assert_allclose(ops.expert_weights(scores, experts, True, 2.0)[0, order], [1.8, 0.2])
  np.testing.assert_allclose(ops.expert_weights(scores, experts, False, 1.0)[0, order], [0.9, 0.1])


def test_mxfp4_nibbles_and_bias():
  packed, one = np.zeros((1, 16), np.uint8), np.array([[127]], np.uint8)
  packed[0, 0] = 0x21
  assert ops.decode_mxfp4(packed, one)[0, :3].tolist() == [0.5, 1.0, 0.0]
  assert ops.decode_mxfp4(packed, one + 7)[0, :2].tolist() == [64.0, 128.0]
