"""The exchange on 8 simulated devices: values, gradients, worst skew, empty slices, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from MaxText.kernels import expert_exchange
from MaxText.kernels.expert_exchange import cases, ragged_all_to_all, reference

MATRICES = cases.send_matrices()
ROWS, WIDTH = 24, 5  # rows that a device can send; a receiver has room for all rows of all of them
ROOM = ROWS * cases.DEVICES


@functools.cache
def program(axes):
  """Result and gradients of a weighted sum, for one naming of the eight devices."""
  sizes = (cases.DEVICES,) if len(axes) == 1 else (2, 4)
  mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))
  spec = PartitionSpec(axes)

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
  def exchange(x, out, *tables):
    return ragged_all_to_all(x[0], out[0], *(table[0] for table in tables), axis_name=axes)[None]

  def loss(x, out, cotangent, *tables):
    y = exchange(x, out, *tables)
    return jnp.sum(y * cotangent), y

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def problem(send_sizes):
  rng = np.random.default_rng(1)
  x = rng.standard_normal((cases.DEVICES, ROWS, WIDTH), dtype=np.float32)
  out, cotangent = rng.standard_normal((2, cases.DEVICES, ROOM, WIDTH), dtype=np.float32)
  inputs, outputs = cases.offsets(send_sizes)
  return x, out, cotangent, (inputs, send_sizes, outputs, np.ascontiguousarray(send_sizes.T))


@pytest.mark.parametrize("axes", [("x",), ("b", "a")], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_values_and_gradients(name, axes):
  x, out, cotangent, tables = problem(MATRICES[name])
  (_, got), (dx, dout) = program(axes)(x, out, cotangent, *tables)
  np.testing.assert_array_equal(got, reference.ragged_all_to_all(x, out, *tables[:3]))
  inputs, sizes, outputs, _ = tables
  want_dx, want_dout = np.zeros_like(x), cotangent.copy()
  for i, j in np.ndindex(sizes.shape):
    arrived = slice(outputs[i, j], outputs[i, j] + sizes[i, j])
    want_dx[i, inputs[i, j] : inputs[i, j] + sizes[i, j]] = cotangent[j, arrived]
    want_dout[j, arrived] = 0
  np.testing.assert_array_equal(dx, want_dx)
  np.testing.assert_array_equal(dout, want_dout)


def traced(impl="auto", slices=cases.DEVICES):
  """A program with the exchange and its gradient, traced only."""
  mesh = jax.make_mesh((cases.DEVICES,), ("x",), axis_types=(AxisType.Auto,))
  spec = PartitionSpec("x")

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
  def exchange(x, out, *tables):
    run = functools.partial(ragged_all_to_all, axis_name="x", impl=impl)
    y, pull = jax.vjp(lambda x, out: run(x, out, *tables), x, out)
    return pull(y)

  rows = [jax.ShapeDtypeStruct((cases.DEVICES * n, 3), jnp.float32) for n in (6, 9)]
  tables = [jax.ShapeDtypeStruct((cases.DEVICES * slices,), jnp.int32)] * 4
  return jax.jit(exchange).trace(*rows, *tables)


def test_native_lowers_to_the_collective_in_both_directions(monkeypatch):
  monkeypatch.setattr(expert_exchange, "_platform", lambda: "tpu")
  text = traced().lower(lowering_platforms=("tpu",)).as_text()
  assert text.count("@ragged_all_to_all(") == 2


def test_what_cannot_run_is_refused():
  with pytest.raises(NotImplementedError, match=r"XLA for CPU has none.*\(6, 3\).*gathered"):
    traced("native")
  with pytest.raises(NotImplementedError, match="'ragged', there are native, gathered"):
    traced("ragged")
  with pytest.raises(NotImplementedError, match="got 16 slices for 8 devices"):
    traced(slices=16)
