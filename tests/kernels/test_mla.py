"""Latent attention: direct, absorbed and reference agree for every prefix, packing and length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from MaxText.kernels.mla import blocks, mla
from MaxText.kernels.mla.cases import LENGTHS, TINY, MlaInputs, random_inputs
from tests.op_fixtures import assert_op_close, load_fixture

SCALE = (TINY["N"] + TINY["P"]) ** -0.5
FAST = ("direct", "absorbed")

PACKED = np.zeros((3, 40), np.int32)
PACKED[0, 3:6], PACKED[0, 6], PACKED[0, 9:11], PACKED[0, 11:] = 1, 2, 3, 4
PACKED[0, 20:22] = 0
PACKED[1, :] = 5


@partial(jax.jit, static_argnames=("impl", "scale"))
def run(inputs, prefix=None, segment_ids=None, *, impl="auto", scale=SCALE):
  return mla(*inputs, prefix=prefix, segment_ids=segment_ids, scale=scale, impl=impl)


def prefix_rows(B, S, lengths, seed=5):
  rows = jax.random.normal(jax.random.key(seed), (B, S, TINY["R"] + TINY["P"]))
  return rows, jnp.asarray(lengths, jnp.int32)


def by_hand(inputs, row, t, prefix, ids):
  """One output [H, V] from the definition, in NumPy float64."""
  q_nope, q_tail, latent, w_uk, w_uv = (np.asarray(x, np.float64) for x in inputs)
  if ids[t] == 0:
    return np.zeros((w_uv.shape[0], w_uv.shape[1]))
  seen = latent[row, [s for s in range(t + 1) if ids[s] == ids[t]]]
  if prefix is not None and ids[t] == ids[ids > 0][0]:
    seen = np.concatenate([np.asarray(prefix[0][row, : int(prefix[1][row])], np.float64), seen])
  R = w_uk.shape[-1]
  keys, values = np.einsum("jr,hnr->hjn", seen[:, :R], w_uk), np.einsum("jr,hvr->hjv", seen[:, :R], w_uv)
  scores = np.einsum("hn,hjn->hj", q_nope[row, t], keys) + np.einsum("hp,jp->hj", q_tail[row, t], seen[:, R:])
  weights = np.exp(SCALE * (scores - scores.max(-1, keepdims=True)))
  return np.einsum("hj,hjv->hv", weights / weights.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("packed", [False, True])
def test_every_token_equals_the_definition(impl, packed):
  inputs, prefix = random_inputs(3, 40, **TINY), prefix_rows(3, 9, [0, 5, 9])
  ids = PACKED if packed else np.ones((3, 40), np.int32)
  got = run(inputs, prefix, jnp.asarray(PACKED) if packed else None, impl=impl)
  for row in range(3):
    for t in range(40):
      np.testing.assert_allclose(got[row, t], by_hand(inputs, row, t, prefix, ids[row]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("T", LENGTHS)
def test_fast_forms_equal_the_reference_without_a_prefix(T, impl):
  inputs = random_inputs(2, T, **TINY)
  np.testing.assert_allclose(run(inputs, impl=impl), run(inputs, impl="reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [7, 40, 13]])
def test_blocked_prefix_equals_the_reference(impl, lengths, monkeypatch):
  monkeypatch.setattr(blocks, "SINGLE_BLOCK", 16)
  monkeypatch.setattr(blocks, "BLOCK", 16)
  inputs, prefix = random_inputs(3, 3, **TINY), prefix_rows(3, 40, lengths)
  ids = jnp.asarray([[1, 1, 1], [0, 2, 2], [4, 4, 5]])
  rows = prefix[0].at[jnp.arange(40) >= prefix[1][:, None]].set(1e4)
  got = jax.jit(lambda *x: mla(*x, prefix=(rows, prefix[1]), segment_ids=ids, scale=SCALE, impl=impl))(
    *inputs
  )
  np.testing.assert_allclose(got, run(inputs, prefix, ids, impl="reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", FAST)
def test_blocked_tokens_equal_the_reference_with_gradients(impl, monkeypatch):
  monkeypatch.setattr(blocks, "SINGLE_BLOCK", 16)
  monkeypatch.setattr(blocks, "BLOCK", 16)
  inputs, ids = random_inputs(3, 40, **TINY), jnp.asarray(PACKED)
  cotangent = jax.random.normal(jax.random.key(9), (3, 40, TINY["H"], TINY["V"]))

  @partial(jax.jit, static_argnums=0)
  def pulled(impl):
    call = partial(mla, prefix=None, segment_ids=ids, scale=SCALE, impl=impl)
    out, pull = jax.vjp(call, *inputs)
    return out, pull(cotangent)

  (got, got_grads), (want, want_grads) = pulled(impl), pulled("reference")
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  for g, w in zip(got_grads, want_grads, strict=True):
    assert np.linalg.norm(g - w) <= 1e-4 * np.linalg.norm(w)


@pytest.mark.parametrize("impl", FAST)
def test_gradients_through_a_short_prefix_equal_the_reference(impl):
  inputs, (rows, length) = random_inputs(3, 17, **TINY), prefix_rows(3, 9, [0, 5, 9])
  cotangent = jax.random.normal(jax.random.key(9), (3, 17, TINY["H"], TINY["V"]))

  @partial(jax.jit, static_argnums=0)
  def pulled(impl):
    def call(inputs, rows):
      return mla(*inputs, prefix=(rows, length), segment_ids=None, scale=SCALE, impl=impl)

    return jax.vjp(call, inputs, rows)[1](cotangent)

  for g, w in zip(jax.tree.leaves(pulled(impl)), jax.tree.leaves(pulled("reference")), strict=True):
    assert np.linalg.norm(g - w) <= 1e-4 * np.linalg.norm(w)


def test_long_calls_hold_no_square_of_scores():
  T = 4096
  shapes = jax.eval_shape(lambda: random_inputs(1, T, **TINY))
  program = jax.jit(partial(mla, prefix=None, segment_ids=None, scale=SCALE)).lower(*shapes).compile()
  assert program.memory_analysis().temp_size_in_bytes < TINY["H"] * T * T * 4 / 4


def test_prefix_cost_follows_the_longest_row_not_the_capacity():
  inputs, prefix = jax.eval_shape(lambda: (random_inputs(2, 1, **TINY), prefix_rows(2, 8192, [3, 4])))
  call = partial(mla, segment_ids=None, scale=SCALE)
  program = str(jax.make_jaxpr(lambda inputs, prefix: call(*inputs, prefix=prefix))(inputs, prefix))
  assert "while[" in program
  assert "8192,8192" not in program and f"{TINY['H']},1,8192" not in program


@pytest.mark.parametrize("impl", FAST)
def test_padding_rows_hold_anything_and_give_zero(impl):
  inputs, ids = random_inputs(3, 40, **TINY), jnp.asarray(PACKED)
  padding = ids == 0
  spoiled = MlaInputs(
    *(jnp.where(padding.reshape(3, 40, *(1,) * (x.ndim - 2)), 1e4, x) for x in inputs[:3]), *inputs[3:]
  )
  got = run(spoiled, None, ids, impl=impl)
  np.testing.assert_array_equal(jnp.where(padding[..., None, None], got, 0), 0)
  np.testing.assert_allclose(got, run(inputs, None, ids, impl=impl), rtol=1e-5, atol=1e-6)


def test_steps_after_a_prefill_equal_one_call():
  inputs = random_inputs(2, 17, **TINY)
  want = run(inputs)
  rows = jnp.zeros((2, 20, TINY["R"] + TINY["P"])).at[:, :17].set(inputs.latent)
  for t in (0, 8, 16):
    token = MlaInputs(*(x[:, t : t + 1] for x in inputs[:3]), *inputs[3:])
    got = run(token, (rows, jnp.full(2, t, jnp.int32)))
    np.testing.assert_allclose(got[:, 0], want[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", FAST)
def test_bfloat16_runs_and_stays_close(impl):
  inputs, (rows, length) = random_inputs(3, 17, **TINY), prefix_rows(3, 9, [0, 5, 9])
  narrow = MlaInputs(*(x.astype(jnp.bfloat16) for x in inputs))
  got = run(narrow, (rows.astype(jnp.bfloat16), length), impl=impl)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(got.astype(jnp.float32), run(inputs, (rows, length)), rtol=0.1, atol=0.05)


def test_auto_absorbs_short_calls_and_expands_long_ones(monkeypatch):
  picked = []
  monkeypatch.setattr("MaxText.kernels.mla.record", lambda op, impl: picked.append(impl))
  for T in (1, 16, 17):
    jax.eval_shape(lambda T=T: mla(*random_inputs(1, T, **TINY), prefix=None, segment_ids=None, scale=SCALE))
  assert picked == ["absorbed", "absorbed", "direct"]


@pytest.mark.parametrize("T", [1, 40])
def test_sharded_heads_equal_unsharded(T, monkeypatch):
  monkeypatch.setattr(blocks, "SINGLE_BLOCK", 16)
  monkeypatch.setattr(blocks, "BLOCK", 16)
  widths = TINY | {"H": 4}
  inputs, prefix = random_inputs(2, T, **widths), prefix_rows(2, 40, [3, 33])
  call = partial(mla, segment_ids=None, scale=SCALE)
  mesh = jax.make_mesh((4,), ("heads",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
  heads = P(None, None, "heads")
  specs = (heads, heads, P(), P("heads"), P("heads"), (P(), P()))
  split = jax.shard_map(lambda *x: call(*x[:5], prefix=x[5]), mesh=mesh, in_specs=specs, out_specs=heads)
  want = run(inputs, prefix, impl="reference")
  np.testing.assert_allclose(jax.jit(split)(*inputs, prefix), want, rtol=1e-4, atol=1e-5)


def rms(x):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_layer_fixture(impl):
  f = {name: x.astype(np.float64) for name, x in load_fixture("mla").items()}
  N, P_, R, V, H = (int(f[name]) for name in ("qk_nope", "qk_rope", "kv_lora", "v_head", "n_heads"))
  x = f["in"]
  q = (rms(x @ f["q_a_proj_weight"].T) @ f["q_b_proj_weight"].T).reshape(1, -1, H, N + P_)
  kv = x @ f["kv_a_proj_with_mqa_weight"].T
  latent = np.concatenate([rms(kv[..., :R]) * f["kv_a_layernorm_weight"], kv[..., R:]], axis=-1)
  up = f["kv_b_proj_weight"].reshape(H, N + V, R)
  arrays = (q[..., :N], q[..., N:], latent, up[:, :N], up[:, N:])
  out = run(MlaInputs(*(jnp.asarray(a, jnp.float32) for a in arrays)), impl=impl, scale=float(f["scale"]))
  gated = np.asarray(out, np.float64).reshape(1, -1, H * V) / (1 + np.exp(-x @ f["g_proj_weight"].T))
  assert_op_close(gated @ f["o_proj_weight"].T, f["out"])
