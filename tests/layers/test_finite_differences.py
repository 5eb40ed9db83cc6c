"""Gradients of the elementwise nonlinearities against central differences in float64, far into saturation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.kernels.kda import log_decay_bounded, log_decay_softplus
from MaxText.layers.situ import situ

LARGE = np.array([-700.0, -90.0, -30.0, -8.0, -1.0, 0.0, 0.5, 3.0, 12.0, 40.0, 88.0, 700.0])
STEP = 1e-5
DIGIT = 2.0**-23


def slope(function, arguments, which):
  """Central difference in one argument, in float64."""
  ends = []
  for sign in (1, -1):
    moved = list(arguments)
    moved[which] = moved[which] + sign * STEP
    ends.append(function(*moved))
  return (ends[0] - ends[1]) / (2 * STEP)


def assert_slopes(got, want, digit):
  """To float32 where there is a slope, and within `digit` of nothing where it has died away.

  The derivatives of sigmoid and tanh near 1 have the digits of 1 - s and 1 - t^2 in float32.
  """
  assert np.isfinite(got).all()
  assert (np.abs(got - want) <= 2e-5 * np.abs(want) + digit + 1e-7).all(), (got, want)


def sigmoid(x):
  return np.exp(-np.logaddexp(0, -x))


def wide_situ(gate, up, linear_beta):
  capped = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
  return 4 * np.tanh(gate / 4) * sigmoid(gate) * capped


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_slopes_of_situ(linear_beta):
  gate, up = (x.ravel() for x in np.meshgrid(LARGE, LARGE))
  narrow = lambda gate, up: jnp.sum(situ(gate, up, beta=4.0, linear_beta=linear_beta))
  got = jax.grad(narrow, argnums=(0, 1))(jnp.float32(gate), jnp.float32(up))
  for which in range(2):
    want = slope(lambda gate, up: wide_situ(gate, up, linear_beta), (gate, up), which)
    other = wide_situ(700, up, linear_beta) if which == 0 else wide_situ(gate, 25, None)
    assert_slopes(got[which], want, DIGIT * np.abs(other))


def wide_bounded(z, A_log, dt_bias):
  return -5 * sigmoid(np.exp(A_log) * (z + dt_bias))


def wide_softplus(z, A_log, dt_bias):
  return -np.exp(A_log) * np.logaddexp(0, z + dt_bias)


def narrow_bounded(z, A_log, dt_bias):
  return log_decay_bounded(z, A_log, dt_bias, -5.0)


@pytest.mark.parametrize(
  "narrow, wide",
  [(narrow_bounded, wide_bounded), (log_decay_softplus, wide_softplus)],
  ids=["bounded", "softplus"],
)
@pytest.mark.parametrize("A_log", [-2.0, 0.0, np.log(16.0)], ids=["slow", "one", "sixteen"])
def test_slopes_of_the_decay_gates(narrow, wide, A_log):
  """One token and head for each value of z, so that the shared parameters have a slope for each as well."""
  z, dt_bias = LARGE, np.array([-6.9, -2.25, 0.7])
  each = jax.vmap(jax.grad(lambda *x: narrow(*x)[0, 0, 0, 0], argnums=(0, 1, 2)), in_axes=(0, None, None))
  for bias in dt_bias:
    shaped = jnp.float32(z).reshape(-1, 1, 1, 1, 1), jnp.full(1, A_log), jnp.full((1, 1), bias)
    got = each(*shaped)
    for which in range(3):
      want = slope(wide, (z, np.full_like(z, A_log), np.full_like(z, bias)), which)
      inner = np.exp(A_log) * (z + bias if which == 1 else 1)
      assert_slopes(np.ravel(got[which]), want, DIGIT * 5 * np.abs(inner))
