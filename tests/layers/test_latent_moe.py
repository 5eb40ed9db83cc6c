"""The expert block against its fixture; padding, permutation, and what must never be materialised."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.latent_moe import LatentMoe
from tests.op_fixtures import assert_op_close, load_fixture
from tests.small import fill, k3_config, kimi_linear_config

FIXTURE = dict(
  base_emb_dim=128,
  routed_expert_hidden_size=64,
  base_moe_mlp_dim=48,
  num_experts=8,
  num_experts_per_tok=2,
  shared_experts=2,
  expert_quantization="none",
)


def fixture_values(data, prefix="") -> dict:
  stack = lambda w: np.stack([data[f"{prefix}experts_{e}_{w}_weight"] for e in range(8)])
  return {f"experts.{w}": stack(w) for w in ("w1", "w2", "w3")} | {
    "gate.weight": data[f"{prefix}gate_weight"],
    "gate.e_score_correction_bias": data[f"{prefix}e_score_correction_bias"],
    "routed_expert_down_proj.weight": data[f"{prefix}down_weight"],
    "routed_expert_up_proj.weight": data[f"{prefix}up_weight"],
    "routed_expert_norm.scale": data[f"{prefix}norm_weight"],
    "shared_experts.gate_proj.weight": data[f"{prefix}shared_w1_weight"],
    "shared_experts.up_proj.weight": data[f"{prefix}shared_w3_weight"],
    "shared_experts.down_proj.weight": data[f"{prefix}shared_w2_weight"],
  }


def random_block(seed=0, **ours):
  cfg = k3_config(**{"expert_quantization": "none", **ours}).model_copy(update={"initializer_range": 0.15})
  return LatentMoe(cfg, rngs=nnx.Rngs(seed)), cfg


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_block_fixture(impl):
  data = load_fixture("moe")
  block = LatentMoe(k3_config(**FIXTURE, moe_impl=impl), rngs=nnx.Rngs(0))
  fill(block, fixture_values(data))
  assert_op_close(block(jnp.asarray(data["in"]))[0], data["out"])


def test_padding_is_counted_by_no_expert_and_gets_no_gradient():
  block, cfg = random_block()
  x = jax.random.normal(jax.random.key(0), (2, 3, cfg.base_emb_dim))
  segments = jnp.int32([[1, 0, 1], [0, 0, 2]])
  poisoned = jnp.where((segments != 0)[..., None], x, 1e6)
  (got, load), (clean, _) = block(poisoned, segments), block(x, segments)
  assert load.dropped == 0 and load.chosen.sum() == 3 * cfg.num_experts_per_tok
  np.testing.assert_array_equal(got[segments != 0], clean[segments != 0])

  def loss(block, x):
    return jnp.sum(jnp.where((segments != 0)[..., None], block(x, segments)[0], 0.0) ** 2)

  grads = [nnx.grad(loss)(block, value) for value in (poisoned, x)]
  for a, b in zip(*(jax.tree.leaves(nnx.state(g.experts)) for g in grads)):
    np.testing.assert_array_equal(a, b)


def test_permuting_experts_with_their_weights_changes_nothing():
  block, cfg = random_block()
  x = jax.random.normal(jax.random.key(1), (1, 7, cfg.base_emb_dim))
  want, _ = block(x)
  order = np.random.default_rng(0).permutation(cfg.num_experts)
  for holder, names in (
    (block.experts, ("w1", "w2", "w3")),
    (block.gate, ("weight", "e_score_correction_bias")),
  ):
    for name in names:
      getattr(holder, name).set_value(getattr(holder, name)[...][order])
  np.testing.assert_allclose(block(x)[0], want, atol=1e-6)


def test_swapping_gate_and_up_changes_the_output():
  block, cfg = random_block()
  x = jax.random.normal(jax.random.key(1), (1, 4, cfg.base_emb_dim))
  want, _ = block(x)
  w1, w3 = block.experts.w1[...], block.experts.w3[...]
  block.experts.w1.set_value(w3)
  block.experts.w3.set_value(w1)
  assert float(jnp.abs(block(x)[0] - want).max()) > 1e-3


def test_resident_mxfp4_equals_plain_weights_of_the_same_values():
  packed, cfg = random_block(expert_quantization="mxfp4")
  plain, _ = random_block()
  from MaxText.kernels.mxfp4 import unpack

  shared = {k: v for k, v in nnx.to_flat_state(nnx.state(packed)) if "experts" not in k}
  nnx.update(plain, nnx.from_flat_state(list(shared.items())))
  for name in ("w1", "w2", "w3"):
    getattr(plain.experts, name).set_value(unpack(packed.experts.weight(name), jnp.float32))
  x = jax.random.normal(jax.random.key(2), (1, 5, cfg.base_emb_dim))
  np.testing.assert_allclose(packed(x)[0], plain(x)[0], atol=1e-6)


def test_no_compiled_tensor_holds_every_pick_times_latent_times_width():
  block, cfg = random_block()
  T, A = 40, cfg.num_experts_per_tok
  banned = T * A * cfg.expert_input_dim * cfg.base_moe_mlp_dim
  graph, state = nnx.split(block)
  text = (
    jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0])
    .lower(state, jax.ShapeDtypeStruct((1, T, cfg.base_emb_dim), jnp.float32))
    .compile()
    .as_text()
  )
  sizes = [np.prod([int(d) for d in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
  assert max(sizes) < banned / 2


def test_kimi_linear_experts_read_the_hidden_state():
  cfg = kimi_linear_config()
  block = LatentMoe(cfg, rngs=nnx.Rngs(0))
  assert not hasattr(block, "routed_expert_down_proj") and not hasattr(block, "routed_expert_norm")
  assert block.experts.w1[...].shape == (cfg.num_experts, cfg.base_moe_mlp_dim, cfg.base_emb_dim)
