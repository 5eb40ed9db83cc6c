"""The short convolution equals a direct sum over the tokens of one document, whatever the packing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.kernels.short_conv import short_conv
from MaxText.kernels.short_conv.cases import CHANNELS, LENGTHS, WIDTH
from tests.op_fixtures import assert_op_close, load_fixture


@partial(jax.jit, static_argnames="impl")
def run(x, weight, window=None, segment_ids=None, *, impl="auto"):
  return short_conv(x, weight, window, segment_ids, impl=impl)


def draw(B, T, seed=0):
  rng = np.random.default_rng(seed)
  shapes = ((B, T, *CHANNELS), (*CHANNELS, WIDTH), (B, WIDTH - 1, *CHANNELS))
  return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def direct_sum(x, weight, window):
  """One document [T, *C] after its window [W-1, *C], in NumPy float64."""
  full = np.concatenate([window, x]).astype(np.float64)
  u = np.stack([np.sum(np.moveaxis(full[t : t + WIDTH], 0, -1) * weight, axis=-1) for t in range(len(x))])
  return u / (1 + np.exp(-u)), full[len(full) - WIDTH + 1 :]


def separate(x, weight, window, ids):
  """One packed row [T, *C], each document alone."""
  y = np.zeros_like(x)
  names = list(dict.fromkeys(ids[ids > 0]))
  last = window
  for name in names:
    at = np.flatnonzero(ids == name)
    y[at], last = direct_sum(x[at], weight, window if name == names[0] else np.zeros_like(window))
  return y, last


PACKED = np.zeros((4, 33), np.int32)
PACKED[0, 3:6], PACKED[0, 6], PACKED[0, 7:9], PACKED[0, 10:13], PACKED[0, 13:] = 1, 2, 3, 4, 5
PACKED[0, 20:22] = PACKED[0, 24] = 0
PACKED[1, 1:12:2], PACKED[1, 30] = 7, 3
PACKED[3, :] = 2


@pytest.mark.parametrize("impl", ["reference", "shifted"])
@pytest.mark.parametrize("T", LENGTHS)
def test_one_document_equals_the_direct_sum(T, impl):
  x, weight, window = draw(2, T)
  y, last = run(x, weight, window, impl=impl)
  for row in range(2):
    want_y, want_last = direct_sum(x[row], weight, window[row])
    np.testing.assert_allclose(y[row], want_y, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(last[row], want_last, rtol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "shifted"])
def test_packed_documents_equal_separate_ones(impl):
  x, weight, window = draw(4, 33)
  spoiled = jnp.where((PACKED == 0)[..., None, None], jnp.nan, x)
  y, last = run(spoiled, weight, window, jnp.asarray(PACKED), impl=impl)
  for row in range(4):
    want_y, want_last = separate(np.asarray(x[row]), weight, window[row], PACKED[row])
    np.testing.assert_allclose(y[row], want_y, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(last[row], want_last, rtol=1e-6)


@pytest.mark.parametrize("ids", [None, PACKED])
def test_gradients_equal_autodiff_of_the_reference(ids):
  x, weight, window = draw(4, 33)
  cotangents = draw(4, 33, seed=1)[::2]

  ids = None if ids is None else jnp.asarray(ids)

  @partial(jax.jit, static_argnums=0)
  def pulled(impl):
    call = partial(short_conv, segment_ids=ids, impl=impl)
    return jax.vjp(call, x, weight, window)[1](cotangents)

  for got, want in zip(pulled("shifted"), pulled("reference"), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 32])
def test_splitting_a_sequence_changes_nothing(cut):
  x, weight, window = draw(2, 33)
  y, last = run(x, weight, window)
  head, middle = run(x[:, :cut], weight, window)
  tail, end = run(x[:, cut:], weight, middle)
  np.testing.assert_allclose(jnp.concatenate([head, tail], axis=1), y, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(end, last)


def test_single_token_skips_padding():
  x, weight, window = draw(2, 1)
  y, last = run(x, weight, window, jnp.asarray([[0], [5]]))
  want_y, want_last = run(x, weight, window)
  np.testing.assert_array_equal(last[0], window[0])
  np.testing.assert_array_equal(y[0], 0)
  np.testing.assert_array_equal(last[1], want_last[1])
  np.testing.assert_array_equal(y[1], want_y[1])


@pytest.mark.parametrize("ids", [None, PACKED[:2]])
def test_window_keeps_its_dtype_and_defaults_to_the_input_s(ids):
  x, weight, window = draw(2, 33)
  ids = None if ids is None else jnp.asarray(ids)
  y, last = jax.eval_shape(lambda x: short_conv(x, weight, None, ids), x.astype(jnp.bfloat16))
  assert y.dtype == last.dtype == jnp.bfloat16
  y, last = jax.eval_shape(lambda x: short_conv(x, weight, window, ids), x.astype(jnp.bfloat16))
  assert (y.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)


def test_bfloat16_input_is_summed_in_float32():
  x, weight, window = draw(2, 33)
  x, window = x.astype(jnp.bfloat16), window.astype(jnp.bfloat16)
  y, _ = run(x, weight, window)
  want, _ = run(x.astype(jnp.float32), weight, window.astype(jnp.float32), impl="reference")
  np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "shifted"])
def test_convolution_fixture(impl):
  f = load_fixture("shortconv")
  weight = jnp.asarray(f["weight"][:, 0])
  y, window = run(jnp.asarray(f["in"]), weight, impl=impl)
  assert_op_close(y, f["out"])
  np.testing.assert_allclose(window, f["state_after"].swapaxes(1, 2), rtol=1e-6)
  y, _ = run(jnp.asarray(f["in_next"]), weight, window, impl=impl)
  assert_op_close(y, f["out_next"])
