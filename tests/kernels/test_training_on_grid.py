"""Experts trained through the MXFP4 grid compute what their bytes will, and learn past the rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.kernels.grouped_matmul import cases, grouped_mlp
from MaxText.kernels.mxfp4 import pack, unpack
from tests.kernels.test_grouped_matmul import assert_close, swiglu

CASE = next(case for case in cases.TESTED if case.name == "rows_64")


@functools.partial(jax.jit, static_argnames=("on_grid", "impl"))
def mlp(x, weights, sizes, on_grid=False, impl="auto"):
  return grouped_mlp(x, *weights, sizes, swiglu, on_grid=on_grid, impl=impl)


@functools.partial(jax.jit, static_argnames="on_grid")
def pullback(x, weights, sizes, cotangent, on_grid):
  forward = lambda x, weights: grouped_mlp(x, *weights, sizes, swiglu, on_grid=on_grid)
  return jax.vjp(forward, x, weights)[1](cotangent)


@pytest.fixture(scope="module")
def problem():
  """Rows, weights off the grid with an outlier that the grid cuts off, group sizes, cotangent."""
  rng = np.random.default_rng(0)
  x, weights = CASE.rows_in(rng), CASE.weights(rng)
  for w in weights:
    w[2, 3, :32] = np.linspace(-0.9, 0.9, 32)
    w[2, 3, 5] = 6.9 / 4  # 6.9 steps of the block's scale, whose largest code is 6
  return x, weights, CASE.group_sizes(rng), rng.standard_normal(x.shape, dtype=np.float32)


def rounded(weights):
  return tuple(unpack(pack(w), np.float32) for w in weights)


def test_the_problem_has_an_outlier_that_the_grid_cuts_off(problem):
  assert (rounded(problem[1])[0][2, 3, 5], problem[1][0][2, 3, 5]) == (1.5, np.float32(1.725))


@pytest.mark.parametrize("impl", ["blocked", "reference"])
def test_forward_has_the_bits_of_the_packed_export(problem, impl):
  x, weights, sizes, _ = problem
  got = mlp(x, weights, sizes, on_grid=True, impl=impl)
  np.testing.assert_array_equal(got, mlp(x, tuple(map(pack, weights)), sizes, impl=impl))
  assert_close(got, mlp(x, rounded(weights), sizes))
  assert float(jnp.abs(got - mlp(x, weights, sizes)).max()) > 1e-2


def test_bfloat16_masters_have_the_bits_of_the_packed_export(problem):
  x, weights, sizes, _ = problem
  masters = tuple(jnp.asarray(w, jnp.bfloat16) for w in weights)
  packed = tuple(pack(np.asarray(w)) for w in masters)
  rows = jnp.asarray(x, jnp.bfloat16)
  got = mlp(rows, masters, sizes, on_grid=True)
  np.testing.assert_array_equal(got.astype(np.float32), mlp(rows, packed, sizes).astype(np.float32))


def test_gradients_are_those_of_the_rounded_weights_as_if_nothing_had_been_rounded(problem):
  x, weights, sizes, cotangent = problem
  got = pullback(x, weights, sizes, cotangent, True)
  want = pullback(x, rounded(weights), sizes, cotangent, False)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert all(np.asarray(g)[2, 3, 5] != 0 for g in got[1])  # nor anything cut off


def test_weights_on_the_grid_train_like_plain_ones(problem):
  x, weights, sizes, cotangent = problem
  on = rounded(weights)
  assert_close(mlp(x, on, sizes, on_grid=True), mlp(x, on, sizes))
  jax.tree.map(
    np.testing.assert_array_equal,
    pullback(x, on, sizes, cotangent, True),
    pullback(x, on, sizes, cotangent, False),
  )


def test_gradients_come_in_the_type_of_the_master_weights(problem):
  x, weights, sizes, cotangent = problem
  masters = tuple(jnp.asarray(w, jnp.bfloat16) for w in weights)
  _, grads = pullback(jnp.asarray(x), masters, sizes, cotangent, True)
  assert {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}


def test_a_stack_or_bytes_are_refused(problem):
  x, weights, sizes, _ = problem
  with pytest.raises(NotImplementedError, match="plain weights of one layer"):
    grouped_mlp(x, *map(pack, weights), sizes, swiglu, on_grid=True)
