"""Loads of the experts in training: what counts, where, and how the selection bias answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.router import update_router_bias
from tests.models.conftest import load
from tests.models.test_laws import ids, packed, row

LAYERS = range(1, 6)  # of the six, those with experts


def counter(model):
  """Program (ids, segment ids) -> counts [moe_layers, E]."""
  return jax.jit(lambda i, s: model.hidden_and_load(i, s)[1].chosen)


@pytest.fixture(scope="module")
def scanned(k3_plain_directory):
  model = load(k3_plain_directory, scan_layers=True)
  assert model.plan.repeats == 2
  return model


@pytest.fixture(scope="module")
def counts_of(k3_plain, scanned):
  return {"unrolled": counter(k3_plain), "scanned": counter(scanned)}


@pytest.mark.parametrize("stack", [pytest.param("unrolled", marks=pytest.mark.slow), "scanned"])
def test_each_real_token_counts_once_for_each_of_its_experts_in_every_layer(counts_of, k3_plain, stack):
  got = counts_of[stack](*row(ids(0, 13), offset=4))
  assert got.shape == (len(LAYERS), k3_plain.cfg.num_experts)
  assert got.sum(axis=1).tolist() == [13 * k3_plain.cfg.num_experts_per_tok] * len(LAYERS)


@pytest.mark.parametrize("stack", ["unrolled", "scanned"])
def test_padding_moves_no_count_and_packed_documents_add_up(counts_of, stack):
  together, alone = packed((1, 5, 9), seed=3)
  got = counts_of[stack](*together)
  np.testing.assert_array_equal(got, sum(counts_of[stack](*one) for one in alone))
  tokens = ids(4, 9)
  np.testing.assert_array_equal(counts_of[stack](*row(tokens)), counts_of[stack](*row(tokens, offset=7)))
  np.testing.assert_array_equal(counts_of[stack](*row([])), 0)


def test_scanned_and_unrolled_stacks_count_alike_in_the_order_of_depth(counts_of):
  batch = row(ids(1))
  got, want = (np.asarray(counts_of[stack](*batch)) for stack in ("scanned", "unrolled"))
  np.testing.assert_array_equal(got, want)
  assert len({tuple(counts) for counts in want}) == len(LAYERS)


def test_the_bias_rises_where_load_is_low_and_falls_where_it_is_high():
  bias = jnp.float32([0.5, 0.0, 0.0, 0.0])
  got = update_router_bias(bias, jnp.int32([9, 1, 1, 5]), 0.01)
  np.testing.assert_allclose(got, [0.49, 0.01, 0.01, -0.01], atol=1e-7)


def test_the_bias_step_has_no_mean_and_equal_loads_or_no_tokens_leave_the_bias_alone():
  bias = jax.random.normal(jax.random.key(0), (2, 8))
  skewed = update_router_bias(bias, jnp.int32([[90, *[1] * 7], [0, *[4] * 7]]), 0.1)
  np.testing.assert_allclose(skewed.mean(axis=-1), bias.mean(axis=-1), atol=1e-7)
  assert skewed[0, 0] < bias[0, 0] and skewed[1, 0] > bias[1, 0]
  np.testing.assert_array_equal(update_router_bias(bias, jnp.full((2, 8), 3), 0.1), bias)
  np.testing.assert_array_equal(update_router_bias(bias, jnp.zeros((2, 8), jnp.int32), 0.1), bias)


@pytest.mark.parametrize("stack", ["unrolled", "scanned"])
def test_balancing_moves_the_bias_of_every_layer_by_its_own_counts(k3_plain, scanned, stack):
  model = nnx.clone({"unrolled": k3_plain, "scanned": scanned}[stack])
  counts = np.random.default_rng(0).integers(0, 50, (len(LAYERS), model.cfg.num_experts))
  before = [bias_of(model, layer) for layer in LAYERS]
  model.balance_routers(jnp.asarray(counts), 0.03)
  for layer, old, load_ in zip(LAYERS, before, counts):
    np.testing.assert_array_equal(bias_of(model, layer), update_router_bias(old, jnp.asarray(load_), 0.03))
  with pytest.raises(ValueError, match="3 layers for 5"):
    model.balance_routers(jnp.asarray(counts[:3]), 0.03)


def bias_of(model, layer):
  part, index, at = model.plan.location(layer)
  return getattr(model, part)[index].block_sparse_moe.gate.e_score_correction_bias[... if at is None else at]


def test_repeated_updates_level_a_skewed_router():
  rng = np.random.default_rng(0)
  scores = jnp.asarray(rng.uniform(0.3, 0.7, (512, 16)) + 0.2 * (np.arange(16) < 2), jnp.float32)

  def worst(bias):
    chosen = jax.lax.top_k(scores + bias, 2)[1]
    counts = jnp.sum(chosen[..., None] == jnp.arange(16), axis=(0, 1))
    return counts, float(counts.max() / counts.mean())

  bias = jnp.zeros(16)
  first = worst(bias)[1]
  for _ in range(60):
    bias = update_router_bias(bias, worst(bias)[0], 0.01)
  assert first > 4 and worst(bias)[1] < 1.3
