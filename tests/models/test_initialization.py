"""Training from scratch starts as published (spec 2.10), whatever the split of the depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.configs.loader import load
from MaxText.models import initialization, registry
from tests.small import kimi_linear_config

PLAIN = "expert_weights=dequantized"


def drawn(cfg, seed=0) -> dict[str, np.ndarray]:
  """Path -> freshly drawn values."""
  state = nnx.state(registry.build(cfg, nnx.Rngs(seed)))
  return {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}


@pytest.fixture(scope="module")
def weights():
  return drawn(load("kimi-k3-tiny", [PLAIN, "scan_layers=false"]))


@pytest.fixture(scope="module")
def softplus_weights():
  return drawn(kimi_linear_config())


def of(weights, ending) -> np.ndarray:
  """All values of the parameters with this ending, in one row."""
  found = [value.ravel() for path, value in weights.items() if path.endswith(ending)]
  assert found, ending
  return np.concatenate(found)


def assert_uniform(values, low, high):
  """Inside the interval, near both ends, and with the mean and the spread of a uniform draw."""
  spread = high - low
  assert low <= values.min() and values.max() <= high
  error = 5 / values.size**0.5
  assert values.max() > high - 20 * spread / values.size and values.min() < low + 20 * spread / values.size
  assert abs(values.mean() - (low + high) / 2) < error * spread / 12**0.5
  assert abs(values.std() - spread / 12**0.5) < error * spread / 12**0.5


@pytest.mark.parametrize(
  "ending",
  ["q_proj.weight", "lm_head.weight", "k_up", "v_up", "experts.w1", "experts.w2", "down_proj.weight"],
)
def test_matrices_are_normal_with_the_published_deviation(weights, ending):
  values = of(weights, ending) / load("kimi-k3-tiny").initializer_range
  error = 5 / values.size**0.5
  assert abs(values.mean()) < error and abs(values.std() - 1) < error
  assert abs(np.mean(values**4) - 3) < 5 * error  # a uniform draw of that deviation has 1.8


def test_embeddings_may_have_a_deviation_of_their_own():
  one_layer = ["base_num_decoder_layers=1", "full_attn_layers=[1]", "attn_res_block_size=1"]
  for key, deviation in (("embedding_initializer_range=null", 0.3), ("embedding_initializer_range=0.7", 0.7)):
    weights = drawn(load("kimi-k3-tiny", [PLAIN, *one_layer, "initializer_range=0.3", key]))
    assert abs(weights["embed_tokens.embedding"].std() / deviation - 1) < 0.02
    assert abs(weights["lm_head.weight"].std() / 0.3 - 1) < 0.02


def test_the_padding_row_of_the_embedding_is_zero_and_no_other(weights):
  rows = np.abs(weights["embed_tokens.embedding"]).max(axis=1)
  assert np.flatnonzero(rows == 0).tolist() == [1023]


def test_pseudo_queries_and_router_biases_are_zero_and_norms_one(weights):
  for ending in ("_res.proj", "e_score_correction_bias"):
    assert not of(weights, ending).any()
  assert set(of(weights, ".scale")) == {1.0}


def test_router_and_convolution_are_kaiming_uniform(weights):
  assert_uniform(of(weights, "gate.weight"), -(144**-0.5), 144**-0.5)
  assert_uniform(of(weights, "qkv_conv1d.weight"), -0.5, 0.5)


def test_decay_rates_follow_the_form_of_the_gate(weights, softplus_weights):
  assert not of(weights, "A_log").any()
  rates = np.exp(of(softplus_weights, "A_log"))
  assert 1 <= rates.min() < rates.max() <= 16 and rates.std() > 1


def test_softplus_of_the_time_step_bias_is_log_uniform_in_a_thousandth_to_a_tenth(weights):
  steps = np.log1p(np.exp(of(weights, "dt_bias").astype(np.float64)))
  assert_uniform(np.log(steps), np.log(0.999e-3), np.log(1.001e-1))


def test_no_two_parameters_share_their_numbers(weights):
  heads = [tuple(v.ravel()[:3]) for path, v in weights.items() if v.std() > 0 and v.size >= 3]
  assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("small", [1 << 20, 30_000], ids=["cut out", "experts alone"])
def test_scanned_and_unrolled_stacks_begin_alike(small, monkeypatch):
  monkeypatch.setattr(initialization, "_SMALL", small)
  keys = ["base_num_decoder_layers=6", "full_attn_layers=2,4,6", "first_num_dense_layers=2", PLAIN]
  trees = [registry.abstract(load("kimi-k3-tiny", [*keys, f"scan_layers={scan}"])) for scan in (True, False)]
  values = [nnx.state(initialization.draw(tree, jax.random.key(0))) for tree in trees]
  scanned = trees[0]
  assert scanned.plan.repeats == 2
  for layer in range(6):
    part, index, row = scanned.plan.location(layer)
    own = nnx.to_flat_state(values[0][part][index])
    for (path, got), (other, want) in zip(own, nnx.to_flat_state(values[1]["layers"][layer]), strict=True):
      assert path == other
      np.testing.assert_array_equal(got[...] if row is None else got[...][row], want[...], str(path))


def test_equal_seeds_give_equal_weights_and_others_do_not():
  cfg = kimi_linear_config(base_num_decoder_layers=1, full_attn_layers=())
  first, again, other = (drawn(cfg, seed) for seed in (0, 0, 1))
  path = "layers.0.self_attn.q_proj.weight"
  np.testing.assert_array_equal(first[path], again[path])
  assert np.abs(first[path] - other[path]).max() > 0.01


def test_bfloat16_parameters_are_drawn_in_their_own_type():
  cfg = kimi_linear_config(base_num_decoder_layers=1, full_attn_layers=(), dtype="bfloat16")
  weights = drawn(cfg)
  assert weights["layers.0.self_attn.q_proj.weight"].dtype == jnp.bfloat16
  assert weights["layers.0.self_attn.A_log"].dtype == np.float32
