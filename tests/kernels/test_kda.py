"""Kimi Delta Attention: every implementation equals the token loop: gates, lengths, packing, splits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from MaxText.kernels import kda as kda_room
from MaxText.kernels.kda import kda, log_decay_bounded, log_decay_softplus
from MaxText.kernels.kda.cases import LENGTHS, KdaInputs, random_inputs
from MaxText.kernels.kda.triangular import unit_lower_inverse
from tests.op_fixtures import assert_op_close, load_fixture


@partial(jax.jit, static_argnames="impl")
def run(inputs, segment_ids=None, *, impl="chunked"):
  return kda(*inputs, segment_ids, impl=impl)


@partial(jax.jit, static_argnames="impl")
def pullback(inputs, cotangents, segment_ids=None, *, impl="chunked"):
  outputs, pull = jax.vjp(lambda *x: kda(*x, segment_ids, impl=impl), *inputs)
  return outputs, pull(cotangents)


def token_loop(inputs):
  """The recurrence of spec section 2.4 in NumPy float64."""
  q, k, v, log_decay, beta, state = (np.asarray(x, np.float64) for x in inputs)
  outs = []
  for t in range(q.shape[1]):
    state = state * np.exp(log_decay[:, t])[..., None]
    delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state))
    state = state + k[:, t, ..., None] * delta[:, :, None]
    outs.append(np.einsum("bhk,bhkv->bhv", q[:, t], state))
  return np.stack(outs, axis=1), state


def assert_close(got, want, *, rtol=1e-5, atol=2e-6):
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=rtol, atol=atol)


def assert_norm_close(got, want, limit=1e-4):
  for g, w in zip(got, want, strict=True):
    assert np.linalg.norm(g - w) <= limit * np.linalg.norm(w) + 1e-7


def section(inputs, start, stop, state):
  return KdaInputs(*(x[:, start:stop] for x in inputs[:5]), state)


@pytest.mark.parametrize("T", LENGTHS)
def test_chunked_and_reference_equal_the_float64_loop(T):
  inputs = random_inputs((2, T, 2, 16, 8), seed=T)
  want = token_loop(inputs)
  assert_close(run(inputs, impl="reference"), want)
  assert_close(run(inputs, impl="chunked"), want)


def test_single_step_equals_the_float64_loop():
  inputs = random_inputs((3, 1, 2, 16, 8))
  assert_close(run(inputs, impl="step"), token_loop(inputs))


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("shift", [-3.0, -1.0, 0.0, 1.0, 3.0])
def test_chunked_holds_for_every_gate_and_key_correlation(shift, correlation):
  inputs = random_inputs((2, 129, 2, 16, 8), shift=shift, correlation=correlation)
  assert_close(run(inputs), token_loop(inputs), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gates_at_the_lower_bound_stay_finite_and_exact(dtype):
  inputs = random_inputs((1, 256, 2, 16, 8))
  rounded = [x.astype(dtype).astype(jnp.float32) for x in inputs[:3]]
  inputs = KdaInputs(*rounded, jnp.full_like(inputs.log_decay, -5.0), *inputs[4:])
  assert_close(run(inputs), token_loop(inputs))


@pytest.mark.parametrize("gate", [-6.0, -100.0, -1e4])
def test_unbounded_gates_are_correct(gate):
  inputs = random_inputs((2, 129, 2, 16, 8), shift=-3.0)
  fast = jnp.arange(129)[:, None, None] % 5 == 0
  assert_close(
    run(inputs._replace(log_decay=jnp.full_like(inputs.log_decay, gate))),
    token_loop(inputs._replace(log_decay=jnp.full_like(inputs.log_decay, gate))),
  )
  mixed = inputs._replace(log_decay=jnp.where(fast, gate, inputs.log_decay))
  assert_close(run(mixed), token_loop(mixed))


@pytest.mark.parametrize("decay", [0.0067, 0.5, 0.9, 0.999])
def test_inverse_of_correlated_keys_is_exact_below_the_diagonal(decay):
  rng = np.random.default_rng(0)
  k = 0.95 + 0.3 * rng.normal(size=(3, 64, 32))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  distance = np.arange(64)[:, None] - np.arange(64)[None, :]
  strict = np.tril(0.99 * (k @ k.swapaxes(-1, -2)) * decay ** np.maximum(distance, 0), -1)
  got = np.tril(jax.jit(unit_lower_inverse, static_argnums=1)(jnp.asarray(strict, jnp.float32), 16), -1)
  want = np.tril(np.linalg.inv(np.eye(64) + strict.astype(np.float32).astype(np.float64)), -1)
  assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
  assert np.sum(got * want) >= 0.9999 * np.linalg.norm(got) * np.linalg.norm(want)


def test_later_tokens_change_neither_earlier_outputs_nor_their_gradients():
  long = random_inputs((2, 128, 2, 16, 8))
  short = section(long, 0, 70, long.state)
  cotangent = random_inputs((2, 128, 2, 16, 8), seed=1).v.at[:, 70:].set(0)
  nothing = jnp.zeros_like(long.state)
  (out, _), grads = pullback(long, (cotangent, nothing))
  (out_short, _), grads_short = pullback(short, (cotangent[:, :70], nothing))
  np.testing.assert_array_equal(out[:, :70], out_short)
  for long_grad, short_grad in zip(grads[:5], grads_short[:5], strict=True):
    np.testing.assert_array_equal(long_grad[:, :70], short_grad)
    np.testing.assert_array_equal(long_grad[:, 70:], 0)
  np.testing.assert_array_equal(grads[5], grads_short[5])


@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_gradients_equal_autodiff_of_the_reference(shift):
  inputs = random_inputs((2, 70, 2, 16, 8), shift=shift)
  other = random_inputs((2, 70, 2, 16, 8), seed=1)
  _, got = pullback(inputs, (other.v, other.state))
  _, want = pullback(inputs, (other.v, other.state), impl="reference")
  assert_norm_close(got, want)


# each row: the document of every token; padding left, right, between and inside, documents of 1, 2, 3 tokens
PACKED = np.zeros((3, 70), np.int32)
PACKED[0, 3:6] = 1
PACKED[0, 6], PACKED[0, 7:9], PACKED[0, 10:13], PACKED[0, 13:70] = 2, 3, 4, 5
PACKED[0, 30:33] = 0
PACKED[1, :40], PACKED[1, 41:60] = 7, 3


def separate(inputs, row):
  """Outputs and last state of one packed row, each document alone through the float64 loop."""
  names = list(dict.fromkeys(PACKED[row][PACKED[row] > 0]))
  out, state = np.zeros_like(inputs.v[row]), inputs.state[row : row + 1]
  for name in names:
    at = np.flatnonzero(PACKED[row] == name)
    start = inputs.state[row : row + 1] if name == names[0] else jnp.zeros_like(state)
    document, state = token_loop(KdaInputs(*(x[row : row + 1, at] for x in inputs[:5]), start))
    out[at] = document[0]
  return out, state[0]


def test_packed_documents_equal_separate_ones():
  inputs = random_inputs((3, 70, 2, 16, 8))
  for impl in ("reference", "chunked"):
    out, state = run(inputs, jnp.asarray(PACKED), impl=impl)
    for row in range(3):
      assert_close((out[row], state[row]), separate(inputs, row))
    np.testing.assert_array_equal(state[2], inputs.state[2])


def test_padding_holds_anything_and_gradients_of_packed_rows_equal_the_reference():
  inputs, other = (random_inputs((3, 70, 2, 16, 8), seed=seed) for seed in (0, 1))
  padding = [(PACKED == 0).reshape(3, 70, *(1,) * (x.ndim - 2)) for x in inputs[:5]]
  spoiled = KdaInputs(*(jnp.where(pad, jnp.nan, x) for pad, x in zip(padding, inputs[:5])), inputs.state)
  cotangents = (other.v, other.state)
  outputs, got = pullback(spoiled, cotangents, jnp.asarray(PACKED))
  want_outputs, want = pullback(inputs, cotangents, jnp.asarray(PACKED), impl="reference")
  assert_close(outputs, want_outputs)
  assert_norm_close(got, want)
  for pad, gradient in zip(padding, got[:5], strict=True):
    np.testing.assert_array_equal(jnp.where(pad, gradient, 0), 0)


def test_single_step_skips_padding():
  inputs = random_inputs((2, 1, 2, 16, 8))
  out, state = run(inputs, jnp.asarray([[0], [4]]), impl="step")
  want_out, want_state = run(inputs, impl="step")
  np.testing.assert_array_equal(state[0], inputs.state[0])
  assert_close((out[1], state[1]), (want_out[1], want_state[1]))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cut=st.sampled_from([1, 16, 17, 33]), seed=st.integers(0, 99))
def test_splitting_a_sequence_changes_nothing(cut, seed):
  inputs = random_inputs((2, 34, 2, 16, 8), seed=seed)
  out, state = run(inputs, impl="auto")
  head, middle = run(section(inputs, 0, cut, inputs.state), impl="auto")
  tail, last = run(section(inputs, cut, 34, middle), impl="auto")
  assert_close((jnp.concatenate([head, tail], axis=1), last), (out, state))


@pytest.mark.parametrize("T", [1, 2])
def test_first_axis_of_the_state_is_the_key(T):
  inputs = random_inputs((1, T, 1, 8, 8))
  once = inputs._replace(
    beta=jnp.ones_like(inputs.beta).at[:, 1:].set(0), log_decay=0 * inputs.log_decay, state=0 * inputs.state
  )
  _, state = run(once, impl="auto")
  np.testing.assert_allclose(
    state[0, 0], np.outer(inputs.k[0, 0, 0], inputs.v[0, 0, 0]), rtol=1e-6, atol=1e-7
  )


@pytest.mark.parametrize("impl", ["reference", "chunked", "step"])
def test_swapped_state_is_refused(impl):
  inputs = random_inputs((1, 1, 2, 16, 8))
  with pytest.raises((TypeError, ValueError)):
    kda(*inputs[:5], inputs.state.swapaxes(-1, -2), impl=impl)


def test_missing_state_is_zero():
  inputs = random_inputs((2, 17, 2, 16, 8))
  assert_close(run(inputs._replace(state=None)), run(inputs._replace(state=jnp.zeros_like(inputs.state))))


def test_step_refuses_two_tokens_by_shape():
  with pytest.raises(NotImplementedError, match=r"T == 1.*\(1, 2, 2, 16\)"):
    kda(*random_inputs((1, 2, 2, 16, 8)), impl="step")


@pytest.mark.parametrize("T", LENGTHS)
def test_auto_never_picks_the_token_loop(T, monkeypatch):
  picked = []
  monkeypatch.setattr(kda_room, "record", lambda op, impl: picked.append((op, impl)))
  inputs = jax.eval_shape(lambda: random_inputs((1, T, 1, 8, 4)))
  program = str(jax.make_jaxpr(lambda *x: kda(*x))(*inputs))
  assert picked == [("kda", "step" if T == 1 else "chunked")]
  assert T == 1 or f"length={-(-T // 64)}" in program


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_sharded_heads_equal_unsharded(devices):
  inputs = random_inputs((1, 16, 8, 16, 8))._replace(state=None)
  mesh = jax.make_mesh((devices,), ("heads",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
  heads = P(None, None, "heads")
  split = jax.shard_map(
    lambda *x: kda(*x), mesh=mesh, in_specs=(heads,) * 5, out_specs=(heads, P(None, "heads"))
  )
  assert_close(jax.jit(split)(*inputs[:5]), run(inputs))


def test_gradient_memory_is_a_fifth_of_the_token_scan():
  shapes = jax.eval_shape(lambda: random_inputs((1, 1024, 2, 64, 64)))

  def temporary(impl):
    def loss(*inputs):
      out, state = kda(*inputs, impl=impl)
      return jnp.sum(out**2) + jnp.sum(state**2)

    program = jax.jit(jax.grad(loss, argnums=range(6))).lower(*shapes).compile()
    return program.memory_analysis().temp_size_in_bytes

  assert temporary("chunked") <= temporary("reference") / 5


@pytest.mark.parametrize("name", ["kda_recur1", "kda_recur8"])
@pytest.mark.parametrize("impl", ["reference", "chunked", "auto"])
def test_recurrence_fixture(name, impl):
  f = load_fixture(name)
  inputs = (f["q"] * f["q_scale"], f["k"], f["v"], np.log(f["alpha"]), f["beta"])
  inputs = [jnp.asarray(x[None], jnp.float32) for x in inputs]
  out, state = kda(*inputs, impl=impl)
  assert_op_close(out[0], f["out"])
  assert_op_close(state[0], f["state_out"])


def test_decay_fixture():
  f = load_fixture("kda_decay")
  shape = f["g"].shape
  z, A_log, dt_bias = f["z"].reshape(shape), f["A_log"], f["dt_bias"].reshape(shape[-2:])
  got = log_decay_bounded(*map(jnp.asarray, (z, A_log, dt_bias)), float(f["lower_bound"]))
  np.testing.assert_allclose(got, f["g"], rtol=1e-5, atol=1e-5)


def test_bounded_gate_values():
  z = jnp.asarray([0.0, 1000.0, -700.0]).reshape(1, 3, 1, 1)
  got = log_decay_bounded(z, jnp.zeros(1), jnp.zeros((1, 1)), -5.0)
  np.testing.assert_array_equal(got.ravel(), [-2.5, -5.0, 0.0])


@pytest.mark.parametrize("gate", [partial(log_decay_bounded, lower_bound=-5.0), log_decay_softplus])
def test_gates_stay_in_float32_and_take_each_channel_s_bias(gate):
  rng = np.random.default_rng(0)
  z, A_log, dt_bias = rng.normal(size=(1, 2, 3, 4)), np.log(rng.uniform(1, 16, 3)), rng.normal(size=(3, 4))
  z = jnp.asarray(z, jnp.bfloat16)
  got = gate(z, jnp.asarray(A_log, jnp.float32), jnp.asarray(dt_bias, jnp.float32))
  moved = np.exp(A_log)[:, None] * (np.asarray(z, np.float64) + dt_bias)
  bare = np.exp(A_log)[:, None] * np.log1p(np.exp(np.asarray(z, np.float64) + dt_bias))
  want = -bare if gate is log_decay_softplus else -5 / (1 + np.exp(-moved))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=2e-5)
