"""The KDA layer against its operator fixture, and its behaviour at the edges of a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.attention_kda import KimiDeltaAttention
from MaxText.layers.cache import KdaCache
from tests.op_fixtures import assert_op_close, load_fixture
from tests.small import fill, k3_config, kimi_linear_config


def fixture_values(data) -> dict:
  conv = np.stack([data[f"{name}_conv"][:, 0] for name in "qkv"])
  direct = {
    f"{name}.weight": data[name] for name in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "b_proj")
  }
  return direct | {
    "f_a_proj.weight": data["f_a"],
    "f_b_proj.weight": data["f_b"],
    "qkv_conv1d.weight": conv,
    "A_log": data["A_log"],
    "dt_bias": data["dt_bias"].reshape(4, 16),
    "o_norm.scale": data["o_norm"],
  }


def fixture_layer(**ours):
  cfg = k3_config(base_emb_dim=128, kda_num_heads=4, kda_head_dim=16, **ours)
  return KimiDeltaAttention(cfg, rngs=nnx.Rngs(0)), cfg


def empty_cache(cfg, B=1):
  H, K = cfg.kda_num_heads, cfg.kda_head_dim
  return KdaCache(
    jnp.zeros((B, cfg.short_conv_kernel_size - 1, 3, H * K), cfg.dtype), jnp.zeros((B, H, K, K))
  )


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_layer_fixture(impl):
  data = load_fixture("kda_layer8")
  layer, cfg = fixture_layer(kda_impl=impl)
  fill(layer, fixture_values(data))
  out, cache = layer(jnp.asarray(data["in"]), empty_cache(cfg))
  assert_op_close(out, data["out"])
  assert_op_close(cache.state, data["state_out"])


def test_single_steps_from_a_cold_cache_equal_the_fixture():
  data = load_fixture("kda_layer8")
  layer, cfg = fixture_layer()
  fill(layer, fixture_values(data))
  cache, outs = empty_cache(cfg), []
  for t in range(8):
    out, cache = layer(jnp.asarray(data["in"][:, t : t + 1]), cache)
    outs.append(out)
  assert_op_close(jnp.concatenate(outs, axis=1), data["out"])


def test_permuting_dt_bias_inside_a_head_changes_the_output():
  layer, cfg = fixture_layer()
  layer.dt_bias.set_value(jnp.linspace(-3, 3, 64).reshape(4, 16))
  x = jax.random.normal(jax.random.key(0), (1, 6, 128))
  before, _ = layer(x)
  layer.dt_bias.set_value(jnp.flip(layer.dt_bias[...], axis=1))
  assert float(jnp.abs(layer(x)[0] - before).max()) > 1e-6


def test_decay_parameters_stay_float32_under_bfloat16():
  cfg = k3_config(dtype="bfloat16")
  layer = KimiDeltaAttention(cfg, rngs=nnx.Rngs(0))
  kept = {name: getattr(layer, name)[...].dtype for name in ("A_log", "dt_bias")}
  assert set(kept.values()) == {jnp.dtype("float32")}
  assert layer.qkv_conv1d.weight[...].dtype == layer.o_norm.scale[...].dtype == jnp.float32
  out, cache = layer(jnp.ones((1, 3, cfg.base_emb_dim), jnp.bfloat16), empty_cache(cfg))
  assert out.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32


def test_kimi_linear_has_the_low_rank_gate_and_softplus_decay():
  cfg = kimi_linear_config()
  layer = KimiDeltaAttention(cfg, rngs=nnx.Rngs(0))
  assert not hasattr(layer, "g_proj") and layer.g_b_proj.weight[...].shape[1] == cfg.kda_head_dim
  layer.dt_bias.set_value(layer.dt_bias[...] + 3)
  log_decay, beta = layer._gates(jnp.ones((1, 2, cfg.base_emb_dim)))
  assert float(log_decay.min()) < -5 and float(log_decay.max()) < 0 and 0 < float(beta.min())


def test_initial_decay_rates_follow_the_published_training_code():
  bounded = KimiDeltaAttention(k3_config(), rngs=nnx.Rngs(0))
  free = KimiDeltaAttention(kimi_linear_config(), rngs=nnx.Rngs(0))
  assert float(jnp.abs(bounded.A_log[...]).max()) == 0
  assert 0 <= float(free.A_log[...].min()) and float(free.A_log[...].max()) <= np.log(16)
  step = jax.nn.softplus(free.dt_bias[...])
  assert 1e-3 * 0.999 <= float(step.min()) and float(step.max()) <= 1e-1 * 1.001
