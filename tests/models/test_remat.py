"""Rematerialisation keeps less and changes nothing.

Compiled, XLA fuses the recomputation otherwise than the first pass, and merges in one program what the other
computes twice; gradients move in the last digits (up to 2e-5 of a leaf's largest value, here and in
`test_laws.py`). Without these two passes they have equal bits.
"""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import IDS, K3, load
from tests.models.test_laws import ids
from tests.reference.generator import k3_config_json, write_checkpoint

TOKENS = 5


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  """A linear dense layer below a full one with experts; and four layers in which a scan finds two cycles."""
  shapes = {
    "two": dict(num_hidden_layers=2, full_attn_layers=(2,)),
    "scan": dict(num_hidden_layers=4, full_attn_layers=(2, 4), first_k_dense_replace=0),
  }
  write = lambda name: write_checkpoint(
    tmp_path_factory.mktemp(name),
    k3_config_json(**K3 | shapes[name], **IDS),
    seed=5,
    dtype="f32",
    packed=False,
  )
  return {name: write(name) for name in shapes}


def loss_of(model):
  """Function and argument: sum of log-likelihoods over the parameters."""
  graph, param, rest = nnx.split(model, nnx.Param, ...)
  tokens = jnp.asarray(ids(0, 2 * TOKENS).reshape(2, TOKENS))
  segments = jnp.int32([[1] * TOKENS, [1, 1, 2, 2, 0]])

  def loss(param):
    logits = nnx.merge(graph, param, rest)(tokens, None, segments)[0]
    return -jnp.sum(jax.nn.log_softmax(logits)[..., 0] * (segments != 0))

  return loss, param


@pytest.mark.parametrize(
  "stack, policy",
  [
    ("two", "full"),
    pytest.param("two", "minimal", marks=pytest.mark.slow),
    pytest.param("scan", "full", marks=pytest.mark.slow),
    pytest.param("scan", "minimal", marks=pytest.mark.slow),
  ],
)
def test_gradients_have_equal_bits_where_xla_neither_fuses_nor_merges(directories, stack, policy):
  """The whole decoder with its fast kernels, compiled: each operation is the same, on the same numbers."""
  options = {"xla_disable_hlo_passes": "fusion,cse"}

  def gradients(policy):
    loss, param = loss_of(load(directories[stack], remat_policy=policy, scan_layers=stack == "scan"))
    return jax.jit(jax.value_and_grad(loss)).lower(param).compile(compiler_options=options)(param)

  want, got = gradients("none"), gradients(policy)
  for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b, jax.tree_util.keystr(path))


def kept_bytes(directory, policy, capsys, **ours) -> int:
  """Bytes that the backward pass gets from the forward pass, arguments excepted."""
  capsys.readouterr()
  jax.ad_checkpoint.print_saved_residuals(*loss_of(load(directory, remat_policy=policy, **ours)))
  total = 0
  for line in capsys.readouterr().out.splitlines():
    dtype, dims = re.match(r"(\w+)\[([\d,]*)\]", line).groups()
    if "from the argument" not in line and "from a constant" not in line:
      size = {"f32": 4, "i32": 4, "u32": 4, "bool": 1}[dtype]
      total += size * prod(int(n) for n in dims.split(",") if n)
  return total


@pytest.mark.parametrize("stack", ["two", "scan"])
def test_each_policy_keeps_less_than_the_one_before(directories, stack, capsys):
  scan = dict(scan_layers=stack == "scan")
  kept = [kept_bytes(directories[stack], policy, capsys, **scan) for policy in ("none", "minimal", "full")]
  assert kept[0] > 2 * kept[1] and kept[1] > 1.3 * kept[2] > 0


def test_decoding_recomputes_nothing(directories):
  model = load(directories["two"], remat_policy="full")
  cache = model.init_cache(2, 8)
  assert _checkpointed(jax.make_jaxpr(lambda i: model(i, None)[0])(jnp.zeros((2, 1), jnp.int32))) == 2
  assert _checkpointed(jax.make_jaxpr(lambda i: model(i, cache)[0])(jnp.zeros((2, 1), jnp.int32))) == 0


def _checkpointed(program) -> int:
  """Layers that a program wraps; the kernels' own checkpoints lie inside them, or alone."""
  return sum(equation.primitive.name in ("remat2", "checkpoint") for equation in program.jaxpr.eqns)
