"""Expert choice: biased selection, unbiased weights, renormalisation. The block output cannot see these."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.layers.router import Router, choose_experts
from tests.op_fixtures import load_fixture
from tests.small import k3_config


def config(**ours):
  return k3_config(num_experts=3, num_experts_per_tok=2, **ours)


SCORES, BIAS = jnp.float32([[0.9, 0.8, 0.1]]), jnp.float32([0.0, -1.0, 1.0])


def test_bias_selects_and_unbiased_scores_weigh():
  ids, weights = choose_experts(SCORES, BIAS, config())
  assert sorted(ids[0].tolist()) == [0, 2]
  by_id = dict(zip(ids[0].tolist(), weights[0].tolist()))
  np.testing.assert_allclose([by_id[0], by_id[2]], [0.9, 0.1], rtol=1e-6)


def test_weights_keep_their_sum_without_renormalisation():
  _, weights = choose_experts(0.5 * SCORES, BIAS, config(norm_topk_prob=False))
  np.testing.assert_allclose(weights.sum(), 0.5, rtol=1e-6)


def test_scaling_factor_multiplies_once():
  _, weights = choose_experts(SCORES, BIAS, config(routed_scaling_factor=2.0))
  np.testing.assert_allclose(weights.sum(), 2.0, rtol=1e-6)


def test_ties_go_to_the_lowest_id():
  ids, _ = choose_experts(jnp.full((1, 3), 0.5), jnp.zeros(3), config())
  assert ids[0].tolist() == [0, 1]


def test_closed_groups_are_never_chosen_even_with_negative_scores():
  cfg = k3_config(num_experts=4, num_experts_per_tok=2, n_routing_groups=2, topk_routing_group=1)
  scores, bias = jnp.float32([[0.1, 0.1, 0.9, 0.0]]), jnp.float32([-2.0, -2.0, -1.0, -2.0])
  ids, _ = choose_experts(scores, bias, cfg)
  assert sorted(ids[0].tolist()) == [2, 3]


def test_scores_are_float32_whatever_comes_in():
  cfg = k3_config(dtype="bfloat16")
  router = Router(cfg, rngs=nnx.Rngs(0))
  _, weights = router(jnp.ones((2, cfg.base_emb_dim), jnp.bfloat16))
  assert weights.dtype == jnp.float32 and router.e_score_correction_bias[...].dtype == jnp.float32
  np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


def test_gate_has_a_gradient_and_the_bias_has_none():
  cfg = k3_config()
  x = jax.random.normal(jax.random.key(0), (4, cfg.base_emb_dim))
  grads = nnx.grad(lambda router: jnp.sum(router(x)[1] ** 2))(Router(cfg, rngs=nnx.Rngs(0)))
  assert float(jnp.abs(grads.weight[...]).max()) > 0
  assert float(jnp.abs(grads.e_score_correction_bias[...]).max()) == 0


def test_router_fixture():
  data = load_fixture("router")
  cfg = k3_config(base_emb_dim=128, num_experts=8, num_experts_per_tok=2)
  router = Router(cfg, rngs=nnx.Rngs(0))
  router.weight.set_value(jnp.asarray(data["gate_weight"]))
  router.e_score_correction_bias.set_value(jnp.asarray(data["bias"]))
  ids, weights = (np.asarray(a) for a in router(jnp.asarray(data["in"])))
  want_order, order = np.argsort(data["topk_idx"]), np.argsort(ids)
  np.testing.assert_array_equal(np.sort(ids), np.sort(data["topk_idx"]))
  np.testing.assert_allclose(
    np.take_along_axis(weights, order, 1),
    np.take_along_axis(data["topk_weight"], want_order, 1),
    atol=1e-5,
  )
