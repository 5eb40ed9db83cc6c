"""The blocked grouped products equal the dense definition both ways and read only what they use."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.kernels.grouped_matmul import blocked, cases, grouped_matmul, grouped_mlp
from MaxText.kernels.mxfp4 import pack, unpack

STACK = 3
CASES = {case.name: case for case in cases.TESTED}
EXPERTS = cases.TESTED[0].experts
by_case = pytest.mark.parametrize("case", cases.TESTED, ids=lambda case: case.name)


def swiglu(gate, up):
  return jax.nn.silu(gate) * up


@functools.partial(jax.jit, static_argnames="impl")
def mlp(x, weights, group_sizes, layer=None, impl="blocked"):
  return grouped_mlp(x, *weights, group_sizes, swiglu, layer=layer, impl=impl)


@functools.partial(jax.jit, static_argnames="impl")
def mlp_gradient(x, weights, group_sizes, cotangent, layer=None, impl="blocked"):
  def loss(x, weights):
    return (mlp(x, weights, group_sizes, layer, impl) * cotangent).sum()

  return jax.grad(loss, argnums=(0, 1))(x, weights)


def routings(case) -> dict[str, np.ndarray]:
  """Group sizes that a router can produce, named."""
  rng = np.random.default_rng(case.rows)
  one = np.zeros(EXPERTS, np.int32)
  one[5] = case.rows
  partial = rng.multinomial(case.rows // 2, np.full(EXPERTS, 1 / EXPERTS)).astype(np.int32)
  skewed = rng.multinomial(case.rows, rng.dirichlet(np.full(EXPERTS, 0.2))).astype(np.int32)
  return {"even": case.group_sizes(rng), "skewed": skewed, "one": one, "partial": partial, "none": 0 * one}


def problem(case, stack=None):
  rng = np.random.default_rng(7)
  x, weights = case.rows_in(rng), case.weights(rng, stack)
  return x, weights, rng.standard_normal(x.shape, dtype=np.float32)


def assert_close(got, want):
  scale = max(1.0, np.abs(want).max(initial=0))
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)


@by_case
def test_mlp_equals_the_definition(case):
  x, weights, _ = problem(case)
  for sizes in routings(case).values():
    got = mlp(x, weights, sizes)
    assert_close(got, mlp(x, weights, sizes, impl="reference"))
    assert not np.asarray(got)[sizes.sum() :].any()


@by_case
def test_gradients_equal_those_of_the_definition(case):
  x, weights, cotangent = problem(case)
  for sizes in routings(case).values():
    got = mlp_gradient(x, weights, sizes, cotangent)
    want = mlp_gradient(x, weights, sizes, cotangent, impl="reference")
    jax.tree.map(assert_close, got, want)
    for gradient in got[1]:
      assert not np.asarray(gradient)[sizes == 0].any()
    assert not np.asarray(got[0])[sizes.sum() :].any()


def test_a_stack_is_read_and_differentiated_at_its_layer():
  case = CASES["rows_64"]
  x, stacked, cotangent = problem(case, STACK)
  sizes, layer = routings(case)["partial"], jnp.int32(1)
  own = tuple(w[1] for w in stacked)
  np.testing.assert_array_equal(mlp(x, stacked, sizes, layer), mlp(x, own, sizes))
  got = mlp_gradient(x, stacked, sizes, cotangent, layer)
  want = mlp_gradient(x, own, sizes, cotangent)
  assert_close(got[0], want[0])
  for stack_gradient, gradient in zip(got[1], want[1]):
    assert_close(stack_gradient[1], gradient)
    assert not np.asarray(stack_gradient)[[0, 2]].any()


@by_case
def test_packed_weights_give_what_their_unpacked_values_give(case):
  x, weights, _ = problem(case)
  packed = jax.tree.map(pack, weights)
  plain = tuple(unpack(w, np.float32) for w in packed)
  for sizes in routings(case).values():
    assert_close(mlp(x, packed, sizes), mlp(x, plain, sizes))


def test_rows_have_the_same_gradient_through_packed_weights():
  case = CASES["rows_64"]
  x, weights, cotangent = problem(case)
  packed = jax.tree.map(pack, weights)
  plain = tuple(unpack(w, np.float32) for w in packed)
  sizes = routings(case)["skewed"]
  gradient = jax.jit(lambda x, weights: jax.grad(lambda x: (mlp(x, weights, sizes) * cotangent).sum())(x))
  assert_close(gradient(x, packed), gradient(x, plain))


def test_single_matmul_equals_the_definition_plain_packed_and_stacked():
  case = CASES["rows_64"]
  x, (w, _, _), _ = problem(case, STACK)
  sizes, layer = routings(case)["partial"], jnp.int32(2)
  run = jax.jit(grouped_matmul, static_argnames="impl")
  want = run(x, w[2], sizes, impl="reference")
  assert want.shape == (case.rows, case.width)
  assert_close(run(x, w[2], sizes), want)
  assert_close(run(x, w, sizes, layer=layer), want)
  packed = pack(w)
  assert_close(run(x, packed, sizes, layer=layer), run(x, packed, sizes, layer=layer, impl="reference"))


@settings(max_examples=10, deadline=None)
@given(permutation=st.permutations(range(EXPERTS)))
def test_renaming_experts_changes_nothing(permutation):
  case, order = CASES["rows_64"], np.array(permutation)
  x, weights, _ = problem(case)
  sizes = routings(case)["skewed"]
  end = np.cumsum(sizes)
  rows = np.concatenate([np.arange(end[e] - sizes[e], end[e]) for e in order])
  got = mlp(x[rows], tuple(w[order] for w in weights), sizes[order])
  assert_close(got, np.asarray(mlp(x, weights, sizes))[rows])


@pytest.mark.parametrize("name", ["rows_64", "rows_300"])
def test_only_tiles_with_rows_are_computed(name):
  case, tiles = CASES[name], []

  def counted(gate, up):
    jax.debug.callback(lambda: tiles.append(gate.shape[0]))
    return swiglu(gate, up)

  x, weights, _ = problem(case)
  run = jax.jit(lambda sizes: grouped_mlp(x, *weights, sizes, counted, impl="blocked"))
  height = blocked.tile_height(case.rows, EXPERTS, 4 * case.latent * case.width)
  for sizes in routings(case).values():
    tiles.clear()
    jax.block_until_ready(run(sizes))
    jax.effects_barrier()
    assert len(tiles) == (-(-sizes // height)).sum()


def test_no_array_holds_the_weights_of_every_row():
  case = CASES["rows_64"]
  x, weights, cotangent = problem(case, STACK)
  sizes, layer = routings(case)["even"], jnp.int32(0)
  limit = case.rows * case.latent * case.width
  programs = (
    mlp.lower(x, weights, sizes, layer),
    mlp.lower(x, jax.tree.map(pack, weights), sizes, layer),
    mlp_gradient.lower(x, weights, sizes, cotangent, layer),
  )
  for program in programs:
    shapes = re.findall(r"\[([\d,]+)\]", program.compile().as_text())
    assert max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes) < limit
  forward = programs[0].compile().memory_analysis()
  assert forward.temp_size_in_bytes < 8 * case.latent * case.width * 4


def test_bfloat16_keeps_its_dtype_and_accumulates_in_float32():
  case = CASES["rows_64"]
  x, weights, cotangent = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), problem(case))
  sizes = routings(case)["skewed"]
  got, want = mlp(x, weights, sizes), mlp(x, weights, sizes, impl="reference")
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2**-7, atol=1e-3)
  gradient = mlp_gradient(x, weights, sizes, cotangent)
  want = mlp_gradient(x, weights, sizes, cotangent, impl="reference")
  for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(want)):
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2**-6, atol=2e-2)


def test_infinities_in_unused_experts_and_rows_reach_nothing():
  case = CASES["rows_64"]
  x, weights, cotangent = problem(case)
  sizes = routings(case)["partial"].copy()
  sizes[5] = 0
  poisoned = tuple(np.where((sizes == 0)[:, None, None], np.inf, w).astype(np.float32) for w in weights)
  bad_x, bad_cotangent = x.copy(), cotangent.copy()
  bad_x[sizes.sum() :], bad_cotangent[sizes.sum() :] = np.nan, np.nan
  np.testing.assert_array_equal(mlp(bad_x, poisoned, sizes), mlp(x, weights, sizes))
  got, want = mlp_gradient(bad_x, poisoned, sizes, bad_cotangent), mlp_gradient(x, weights, sizes, cotangent)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_experts_spread_over_devices_inside_shard_map():
  case, devices = CASES["rows_8"], 4
  rng = np.random.default_rng(3)
  _, weights, _ = problem(case)
  x, cotangent = rng.standard_normal((2, devices, case.rows, case.latent), dtype=np.float32)
  sizes = rng.multinomial(case.rows - 1, [0.7, 0.3], size=devices).astype(np.int32)
  mesh = jax.make_mesh((devices,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("expert")

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
  def local(x, weights, sizes, cotangent):
    y, pull = jax.vjp(lambda x, weights: mlp(x, weights, sizes), x[0], weights)
    dx, dweights = pull(cotangent[0])
    return y[None], dx[None], dweights

  y, dx, dweights = jax.jit(local)(x, weights, sizes.reshape(-1), cotangent)
  for i in range(devices):
    own = tuple(w[2 * i : 2 * i + 2] for w in weights)
    assert_close(y[i], mlp(x[i], own, sizes[i], impl="reference"))
    want = mlp_gradient(x[i], own, sizes[i], cotangent[i], impl="reference")
    jax.tree.map(assert_close, (dx[i], tuple(w[2 * i : 2 * i + 2] for w in dweights)), want)


def test_a_batch_of_routings_under_vmap():
  case = CASES["rows_64"]
  x, weights, _ = problem(case)
  sizes = np.stack(list(routings(case).values()))
  got = jax.jit(jax.vmap(lambda sizes: mlp(x, weights, sizes)))(sizes)
  for row, own in zip(got, sizes):
    assert_close(row, mlp(x, weights, own))


def test_an_unknown_implementation_is_refused():
  case = CASES["rows_2"]
  x, weights, _ = problem(case)
  with pytest.raises(NotImplementedError, match="ragged"):
    grouped_mlp(x, *weights, routings(case)["even"], swiglu, impl="ragged")
