"""The MLA layer against its operator fixture, and the role of its gate and its query norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.attention_mla import GatedLatentAttention
from MaxText.layers.cache import MlaCache
from tests.op_fixtures import assert_op_close, load_fixture
from tests.small import fill, k3_config, kimi_linear_config


def fixture_layer(**ours):
  shape = dict(base_emb_dim=128, base_num_query_heads=4, q_lora_rank=64, kv_lora_rank=32)
  dims = dict(qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, mla_norm_eps=1e-5)
  cfg = k3_config(**shape, **dims, **ours)
  return GatedLatentAttention(cfg, rngs=nnx.Rngs(0)), cfg


def fixture_values(data) -> dict:
  kv_b = data["kv_b_proj_weight"].reshape(4, 24 + 16, 32)
  names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "g_proj", "o_proj")
  return {f"{name}.weight": data[f"{name}_weight"] for name in names} | {
    "q_a_layernorm.scale": data["q_a_layernorm_weight"],
    "kv_a_layernorm.scale": data["kv_a_layernorm_weight"],
    "k_up": kv_b[:, :24],
    "v_up": kv_b[:, 24:],
  }


def empty_cache(cfg, B=1, S=16):
  return MlaCache(jnp.zeros((B, S, cfg.latent_width), cfg.dtype), jnp.zeros(B, jnp.int32))


@pytest.mark.parametrize("impl", ["reference", "direct", "absorbed"])
def test_layer_fixture(impl):
  data = load_fixture("mla")
  layer, cfg = fixture_layer(mla_impl=impl)
  fill(layer, fixture_values(data))
  out, cache = layer(jnp.asarray(data["in"]), empty_cache(cfg))
  assert_op_close(out, data["out"])
  want = np.concatenate([data["kv_latent"], data["k_rope"]], axis=-1)
  np.testing.assert_allclose(cache.latent[:, :6], want, atol=1e-5)
  assert cache.length.tolist() == [6]


def test_single_steps_equal_the_fixture():
  data = load_fixture("mla")
  layer, cfg = fixture_layer()
  fill(layer, fixture_values(data))
  cache, outs = empty_cache(cfg), []
  for t in range(6):
    out, cache = layer(jnp.asarray(data["in"][:, t : t + 1]), cache)
    outs.append(out)
  assert_op_close(jnp.concatenate(outs, axis=1), data["out"])


def test_a_closed_half_gate_gives_exactly_half():
  layer, cfg = fixture_layer()
  ungated = GatedLatentAttention(cfg.model_copy(update={"mla_use_output_gate": False}), rngs=nnx.Rngs(0))
  for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
    getattr(ungated, name).weight.set_value(getattr(layer, name).weight[...])
  ungated.k_up.set_value(layer.k_up[...])
  ungated.v_up.set_value(layer.v_up[...])
  layer.g_proj.weight.set_value(jnp.zeros_like(layer.g_proj.weight[...]))
  x = jax.random.normal(jax.random.key(1), (1, 5, 128))
  np.testing.assert_allclose(layer(x)[0], 0.5 * ungated(x)[0], rtol=1e-6, atol=1e-9)


def test_mla_norm_eps_is_its_own_key():
  data = load_fixture("mla")
  x = 1e-3 * jnp.asarray(data["in"])
  outs = []
  for eps in (1e-5, 1e-6):
    layer, cfg = fixture_layer()
    layer = GatedLatentAttention(cfg.model_copy(update={"mla_norm_eps": eps}), rngs=nnx.Rngs(0))
    fill(layer, fixture_values(data))
    outs.append(layer._latents(x))
  assert float(jnp.abs(outs[0] - outs[1]).max()) > 1e-2
  assert k3_config().mla_norm_eps == 1e-6


def test_kimi_linear_projects_queries_without_a_rank_and_has_no_gate():
  layer = GatedLatentAttention(kimi_linear_config(), rngs=nnx.Rngs(0))
  assert hasattr(layer, "q_proj") and not hasattr(layer, "q_a_proj") and not hasattr(layer, "g_proj")
