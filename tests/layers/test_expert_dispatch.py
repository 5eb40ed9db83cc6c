"""Experts on 8 simulated devices against one: both dispatches, any routing, packed and stacked weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from MaxText.layers import expert_dispatch
from MaxText.layers.expert_dispatch import ExpertMesh, OwnExperts, dispatch
from MaxText.layers.latent_moe import Experts
from MaxText.layers.lora import LoRAParam
from MaxText.models.adapters import attach
from tests.small import k3_config

M, A, E = 26, 2, 8  # tokens that eight devices do not divide
AXES = ("data", "fsdp", "expert", "tensor")
# (sizes of the mesh, axes that split tokens, experts, and the width of each expert)
PLACES = {
  "whole_experts": ((1, 2, 2, 2), ("fsdp", "expert"), ("expert", "fsdp", "tensor"), ()),
  "cut_experts": ((1, 2, 2, 2), ("fsdp", "expert"), ("expert", "fsdp"), ("tensor",)),
  "replicas": ((2, 1, 4, 1), ("data", "expert"), ("expert",), ()),
  "no_expert_axis": ((1, 2, 1, 4), ("fsdp",), (), ("tensor",)),
}


def place(name: str) -> ExpertMesh:
  sizes, *axes = PLACES[name]
  return ExpertMesh(jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4), *axes)


@functools.cache
def experts(**ours) -> Experts:
  return Experts(k3_config(expert_quantization="none", initializer_range=0.15, **ours), rngs=nnx.Rngs(0))


def weights_of(module: Experts):
  return tuple(module.weight(name) for name in ("w1", "w3", "w2"))


def routings() -> dict[str, jax.Array]:
  """Chosen experts [M, A]: even, all on one device, and experts that nobody chooses."""
  rng = np.random.default_rng(0)
  even = np.stack([rng.permutation(E)[:A] for _ in range(M)])
  few = np.where(even % 4 == 3, even - 1, even)
  return {name: jnp.int32(ids) for name, ids in dict(even=even, one_pair=[[5, 4]] * M, few=few).items()}


def tokens(seed=1):
  rng = np.random.default_rng(seed)
  z, cotangent = rng.standard_normal((2, M, experts().cfg.expert_input_dim), dtype=np.float32)
  combine = rng.random((M, A), dtype=np.float32)
  return *map(jnp.asarray, (z, combine, cotangent)), jnp.arange(M) % 5 != 0


@functools.cache
def program(name, moe_dispatch, capacity=None):
  """Sum, counts and gradients by rows, combine weights and matrices."""
  cfg = experts().cfg.model_copy(update={"moe_dispatch": moe_dispatch, "moe_capacity_factor": capacity})
  devices = place(name)

  def loss(z, combine, matrices, ids, valid, cotangent):
    y, counts = dispatch(devices, OwnExperts(cfg, matrices, None), z, ids, combine, valid)
    return jnp.sum(y * cotangent), (y, counts)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def run(name, moe_dispatch, ids, capacity=None):
  z, combine, cotangent, valid = tokens()
  arguments = z, combine, weights_of(experts()), ids, valid, cotangent
  arguments = jax.device_put(arguments, NamedSharding(place(name).mesh, PartitionSpec()))
  (_, (y, counts)), gradients = program(name, moe_dispatch, capacity)(*arguments)
  return jax.tree.map(np.asarray, (y, gradients)), np.asarray(counts)


@functools.cache
def definition(routing):
  """The experts' own call on one device: what every dispatch has to give."""
  z, combine, cotangent, valid = tokens()
  ids = routings()[routing]
  graph, state = nnx.split(experts())

  def loss(z, combine, state):
    y, counts = nnx.merge(graph, state)(z, ids, combine, valid)
    return jnp.sum(y * cotangent), (y, counts)

  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
  (_, (y, counts)), (dz, dcombine, dstate) = gradient(z, combine, state)
  dmatrices = tuple(dstate[name].get_value() for name in ("w1", "w3", "w2"))
  return jax.tree.map(np.asarray, (y, (dz, dcombine, dmatrices))), np.asarray(counts)


def assert_close(got, want, bound=1e-6):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, rtol=0, atol=bound * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize("routing", routings())
@pytest.mark.parametrize(
  "name, moe_dispatch",
  [(name, "local_experts") for name in PLACES]
  + [(name, "ragged_all_to_all") for name in PLACES if name != "no_expert_axis"],
)
def test_sum_counts_and_gradients_are_those_of_one_device(name, moe_dispatch, routing):
  got, counts = run(name, moe_dispatch, routings()[routing])
  want, want_counts = definition(routing)
  np.testing.assert_array_equal(counts, want_counts)
  assert_close(got, want)


@pytest.mark.parametrize("routing", ["even", "one_pair"])
def test_rows_beyond_one_pass_are_computed_by_further_ones(monkeypatch, routing):
  monkeypatch.setattr(expert_dispatch, "_SMALL", 8)
  program.cache_clear()
  got, counts = run("whole_experts", "local_experts", routings()[routing])
  program.cache_clear()
  assert_close(got, definition(routing)[0])
  np.testing.assert_array_equal(counts, definition(routing)[1])


def test_a_capacity_drops_the_last_rows_and_the_counts_say_how_many():
  ids = routings()["one_pair"]  # two experts of one device with expert width cut; seven devices get nothing
  (y, _), counts = run("replicas", "ragged_all_to_all", ids, capacity=1.0)
  _, _, _, valid = tokens()
  room = M // 2 // 4 + 1  # an even share: A rows of each of a device's tokens, in a group of four
  assert counts.sum() < A * valid.sum() and counts.sum() <= 2 * A * room
  (whole, _), _ = definition("one_pair")
  is_kept = np.abs(y - whole).max(axis=1) < 1e-5
  assert 0 < is_kept[valid].sum() < valid.sum()  # some tokens keep all their rows, others lose one or two
  (y, _), counts = run("replicas", "ragged_all_to_all", ids, capacity=8.0)
  np.testing.assert_array_equal(counts, definition("one_pair")[1])
  assert_close(y, whole)


@pytest.mark.parametrize("moe_dispatch", ["local_experts", "ragged_all_to_all"])
def test_packed_experts_of_a_stack(moe_dispatch):
  packed = [Experts(k3_config(moe_dispatch=moe_dispatch), rngs=nnx.Rngs(seed)) for seed in (0, 1)]
  cfg, row = packed[0].cfg, jnp.int32(1)
  stack = jax.tree.map(lambda *a: jnp.stack(a), *map(weights_of, packed))
  z, combine, _, valid = tokens()
  ids, devices = routings()["even"], place("whole_experts")
  want, want_counts = packed[1](z, ids, combine, valid)
  run = jax.jit(lambda stack, z: dispatch(devices, OwnExperts(cfg, stack, row), z, ids, combine, valid))
  spec = PartitionSpec(None, devices.expert)
  got, counts = run(
    jax.device_put(stack, NamedSharding(devices.mesh, spec)),
    jax.device_put(z, NamedSharding(devices.mesh, PartitionSpec())),
  )
  assert_close(got, want)
  np.testing.assert_array_equal(counts, want_counts)


# by default each kind of experts, dispatch and adapters once
ADAPTED = [
  ("whole_experts", "local_experts", "per_expert"),
  ("cut_experts", "ragged_all_to_all", "shared_a"),
  pytest.param("cut_experts", "local_experts", "shared_a", marks=pytest.mark.slow),
  pytest.param("replicas", "ragged_all_to_all", "per_expert", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, moe_dispatch, kind", ADAPTED)
def test_adapters_of_experts_give_the_sum_and_the_gradients_of_one_device(name, moe_dispatch, kind):
  ours = dict(lora_rank=4, lora_targets=("experts",), lora_experts=kind, moe_dispatch=moe_dispatch)
  adapted = Experts(k3_config(expert_quantization="none", initializer_range=0.15, **ours), rngs=nnx.Rngs(0))
  attach(nnx.Dict(experts=adapted), adapted.cfg, nnx.Rngs(1))
  z, combine, cotangent, valid = tokens()
  graph, lora, base = nnx.split(adapted, LoRAParam, ...)
  lora = jax.tree.map(lambda a: 0.3 * jax.random.normal(jax.random.key(a.size), a.shape), lora)

  def loss(lora, z, place):
    y, _ = nnx.merge(graph, lora, base)(z, routings()["even"], combine, valid, place=place)
    return jnp.sum(y * cotangent), y

  program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
  (_, want), want_gradients = program(lora, z, None)
  (_, got), gradients = program(lora, z, place(name))
  assert_close((got, gradients), (want, want_gradients))
  assert all(np.any(leaf) for leaf in jax.tree.leaves(want_gradients))
