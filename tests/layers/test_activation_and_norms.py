"""SiTU, SwiGLU and the norms against published values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.normalization import RMSNorm, unit_l2
from MaxText.layers.situ import gated_activation, situ, swiglu
from tests.op_fixtures import assert_op_close, load_fixture
from tests.small import k3_config, kimi_linear_config

# spec 2.6, beta 4 and linear beta 25
PUBLISHED = [
  (1, 1, 0.71581783),
  (-3, 50, -2.90389147),
  (100, 100, 99.93292997),
  (2, -30, -33.93236367),
  (8, 8, 29.82731488),
  (-10, 10, -0.00170180),
]


@pytest.mark.parametrize("gate, up, want", PUBLISHED)
def test_situ_gives_the_published_values(gate, up, want):
  got = situ(jnp.float32([gate]), jnp.float32([up]), beta=4.0, linear_beta=25.0)
  np.testing.assert_allclose(got, [want], rtol=2e-6)


def test_situ_without_a_linear_cap_passes_up_unchanged():
  got = situ(jnp.float32([1.0]), jnp.float32([50.0]), beta=4.0, linear_beta=None)
  np.testing.assert_allclose(got, [50 * 0.71581783 / (25 * np.tanh(1 / 25))], rtol=1e-6)


def test_situ_stays_below_the_product_of_its_caps_at_large_inputs():
  x = jnp.float32([1e4, -1e4, 1e30])
  values = situ(x, jnp.flip(x), beta=4.0, linear_beta=25.0)
  gradient = jax.grad(lambda x: situ(x, x, beta=4.0, linear_beta=25.0).sum())(x)
  assert np.all(np.abs(values) <= 100.0) and np.all(np.isfinite(gradient))


def test_situ_fixture():
  data = load_fixture("situ_glu")
  gate, up = np.split(data["in"], 2, axis=-1)
  got = situ(jnp.asarray(gate), jnp.asarray(up), beta=4.0, linear_beta=25.0)
  assert_op_close(got, data["out"])


def test_each_family_has_its_activation():
  assert gated_activation(kimi_linear_config()) is swiglu
  assert gated_activation(k3_config()) is gated_activation(k3_config())


def test_rmsnorm_fixture():
  data = load_fixture("rmsnorm")
  norm = RMSNorm(128, float(data["eps"]), "float32", rngs=nnx.Rngs(0))
  norm.scale.set_value(jnp.asarray(data["weight"]))
  assert_op_close(norm(jnp.asarray(data["in"])), data["out"])


def test_rmsnorm_rounds_before_the_weight():
  norm = RMSNorm(4, 1e-5, "float32", rngs=nnx.Rngs(0))
  norm.scale.set_value(jnp.float32([1.001, 3.0, 1.0, 1.0]))
  x = jnp.bfloat16([0.3, 0.7, -1.1, 2.0])
  unit = np.asarray(x, np.float32) / np.sqrt(np.mean(np.square(np.asarray(x, np.float32))) + 1e-5)
  want = unit.astype(jnp.bfloat16) * np.asarray([1.001, 3.0, 1.0, 1.0]).astype(jnp.bfloat16)
  assert norm(x).dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.asarray(norm(x)), want)


def test_l2_eps_is_added_to_the_sum_not_to_the_mean():
  x = jnp.full((128,), 1e-4, jnp.float32)
  want = 1e-4 / np.sqrt(128 * 1e-8 + 1e-6)
  np.testing.assert_allclose(unit_l2(x), np.full(128, want), rtol=1e-6)
  assert not np.allclose(want, 1e-4 / np.sqrt(128 * (1e-8 + 1e-6)), rtol=0.1)


def test_l2_of_zero_is_zero_with_a_finite_gradient():
  zero = jnp.zeros(8)
  assert np.all(unit_l2(zero) == 0)
  assert np.all(np.isfinite(jax.grad(lambda x: unit_l2(x).sum())(zero)))


def test_l2_of_bfloat16_is_computed_in_float32():
  x = np.asarray(5 * np.random.default_rng(0).standard_normal(128), dtype=jnp.bfloat16)
  exact = x.astype(np.float64) / np.sqrt(np.sum(x.astype(np.float64) ** 2) + 1e-6)
  np.testing.assert_allclose(unit_l2(jnp.asarray(x)), exact, rtol=1e-6)
