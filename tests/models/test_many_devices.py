"""A small K3 on 8 simulated devices against one: logits, every gradient, expert counts, greedy decoding.

The weights are loaded by their shardings from a checkpoint.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.checkpoints.adapters import save_adapters
from MaxText.inference.decode_loop import DecodeLoop, padded
from MaxText.inference.sampling import rows
from MaxText.inference.weights import Source, read_decoder
from MaxText.models.adapters import attach
from MaxText.models.sharding import build_layout, parameter_shardings
from tests.models.conftest import IDS, load
from tests.models.test_sharding import mesh_config
from tests.reference.generator import k3_config_json, write_checkpoint

# a dense linear layer and a full one with experts, each in a block of the residual stream of its own
SHAPE = dict(num_hidden_layers=2, full_attn_layers=(2,), attn_res_block_size=1)
SHAPE |= dict(hidden_size=48, vocab_size=64, kda_heads=4)
B, T, STEPS = 8, 6, 12
MESHES = {"fsdp2_tp2_ep2": {}, "ep8": dict(fsdp=1, expert=8, tensor=1)}
# each compiles a training program for eight devices; test_train_mesh.py trains on the first place
ON_REQUEST = {
  ("fsdp2_tp2_ep2", "local_experts"): pytest.mark.slow,
  ("ep8", "local_experts"): pytest.mark.slow,
  ("fsdp2_tp2_ep2", "ragged_all_to_all"): pytest.mark.slow,
}
PLACES = [
  pytest.param(mesh, dispatch, id=f"{mesh}-{dispatch}", marks=ON_REQUEST.get((mesh, dispatch), ()))
  for mesh in MESHES
  for dispatch in ("local_experts", "ragged_all_to_all")
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  """The same values with plain experts, which have gradients, and with packed ones."""
  config = k3_config_json(**SHAPE, **IDS)
  return {
    packed: write_checkpoint(tmp_path_factory.mktemp("k3"), config, seed=11, dtype="f32", packed=packed)
    for packed in (False, True)
  }


def decoder(directory, mesh=None, **ours):
  layout = None if mesh is None else build_layout(mesh_config(**MESHES[mesh]))
  shardings = None if layout is None else functools.partial(parameter_shardings, layout)
  model = load(directory, mesh_shardings=shardings, **ours)
  model.layout = layout
  return model


def batch():
  """Ids and segments [B, T]: whole rows, packed documents, padding in front, inside and behind."""
  ids = np.random.default_rng(5).integers(0, 61, (B, T)).astype(np.int32)
  segments = np.ones_like(ids)
  segments[1, :3], segments[1, 3:] = 1, 2
  segments[2, :2], segments[3, 4:], segments[4, 1] = 0, 0, 0
  segments[5] = 0
  return jnp.asarray(ids), jnp.asarray(segments)


def compiled(model):
  """Program of (parameters, the rest, ids, segments) -> (loss, (logits, counts)), gradients."""
  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def loss(params, rest, ids, segments):
    model = nnx.merge(graph, params, rest)
    h, (counts, _) = model.hidden_and_load(ids, segments)
    logits = model.logits(h)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(segments != 0, picked, 0.0)), (logits, counts)

  arguments = params, rest, *batch()
  program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*arguments).compile()
  (value, (logits, counts)), gradients = program(*arguments)
  return program, value, logits, counts, gradients


@pytest.fixture(scope="module")
def one_device(directories):
  return compiled(decoder(directories[False]))


def gathered(program, inner: set[tuple[int, ...]]) -> list[str]:
  """Results of all-gathers whose last two dimensions are those of an expert's matrix."""
  shapes = re.findall(r"= \(?(\w+\[[\d,]+\])[^\n]*? all-gather(?:-start)?\(", program.as_text())
  dims = [tuple(int(n) for n in re.search(r"\[(.*)\]", shape)[1].split(",")) for shape in shapes]
  assert shapes, "the program gathers nothing at all"
  return [shape for shape, each in zip(shapes, dims) if len(each) > 2 and each[-2:] in inner]


@pytest.mark.parametrize("mesh, dispatch", PLACES)
def test_training_equals_one_device(directories, one_device, mesh, dispatch):
  program, value, logits, counts, gradients = compiled(
    decoder(directories[False], mesh, moe_dispatch=dispatch)
  )
  _, want_value, want_logits, want_counts, want = one_device
  np.testing.assert_allclose(value, want_value, rtol=1e-5)
  np.testing.assert_allclose(logits, want_logits, rtol=0, atol=1e-5 * np.abs(want_logits).max())
  np.testing.assert_array_equal(counts, want_counts)
  for (path, got), reference in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(want), strict=True):
    bound = 1e-5 * max(float(jnp.abs(reference).max()), 1e-3)
    np.testing.assert_allclose(got, reference, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))
  assert not gathered(program, {(96, 32), (32, 96)})


def greedy(model):
  """Tokens [3, STEPS] after three prompts of unequal length, and the loop that picked them."""
  prompts = [[5, 7, 9, 11, 2], [3], [60, 1, 1, 8, 30, 22, 4, 9, 17]]
  loop = DecodeLoop(model, prefill_chunk=16, steps=STEPS)
  missing = -len(prompts) % loop.row_multiple
  given = [*prompts, *[[]] * missing]
  sampling = rows(len(given), 0.0, 0, 1.0, 0)
  state = loop.prefill(given, [STEPS] * len(given), sampling, [], capacity=32)
  first = np.asarray(state.token)
  picked, state = loop.decode(state, sampling, [], STEPS)
  tokens = np.concatenate([first[:, None], picked[:, : STEPS - 1]], axis=1)[: len(prompts)]
  return prompts, tokens, loop


@pytest.fixture(scope="module")
def greedy_one_device(directories):
  """Tokens of one device, each clear of the runner-up."""
  model = decoder(directories[True])
  prompts, tokens, _ = greedy(model)
  sequences = [[*prompt, *row] for prompt, row in zip(prompts, tokens)]
  logits = jax.jit(lambda ids, segments: model(ids, None, segments)[0])(
    *map(jnp.asarray, padded(sequences, 24))
  )
  for row, prompt in enumerate(prompts):
    at = np.asarray(logits[row, len(prompt) - 1 : len(prompt) + STEPS - 1])
    best = np.sort(at, axis=-1)[:, -2:]
    assert (at.argmax(-1) == tokens[row]).all() and (best[:, 1] - best[:, 0]).min() > 1e-3
  return tokens


@pytest.mark.slow  # tests/inference/test_engine_on_mesh.py compares the tokens of the engine
@pytest.mark.parametrize("mesh, dispatch", [PLACES[0], PLACES[3]])
def test_greedy_decoding_through_sharded_caches_gives_the_same_tokens(
  directories, greedy_one_device, mesh, dispatch
):
  model = decoder(directories[True], mesh, moe_dispatch=dispatch)
  _, tokens, loop = greedy(model)
  np.testing.assert_array_equal(tokens, greedy_one_device)
  (program,) = loop._decode._compiled.values()
  assert not re.findall(r"= \(?u8\[[^\n]*? all-gather", program.as_text())


def test_adapters_are_folded_into_weights_where_they_lie(directories, tmp_path):
  """Those of packed experts stay beside them."""
  cfg = decoder(directories[True]).cfg
  lora = cfg.model_copy(update=dict(lora_rank=2, lora_targets=("self_attn", "experts")))
  model = decoder(directories[True])
  attach(model, lora, nnx.Rngs(0))
  nnx.update(model, jax.tree.map(lambda a: a + 0.05, nnx.state(model, nnx.LoRAParam)))
  save_adapters(model, lora, tmp_path / "adapters")
  layout = build_layout(mesh_config())
  source = Source(directories[True])
  want, _ = read_decoder(cfg, source, adapters=str(tmp_path / "adapters"))
  got, _ = read_decoder(cfg, source, adapters=str(tmp_path / "adapters"), layout=layout)
  shardings = parameter_shardings(layout, got)
  found = nnx.to_flat_state(nnx.state(got))
  assert got.layout == layout and any(keys[-2] == "w1_lora" for keys, _ in found)
  for (keys, mine), (_, other) in zip(found, nnx.to_flat_state(nnx.state(want)), strict=True):
    assert mine.get_value().sharding == shardings[".".join(map(str, keys))]
    np.testing.assert_allclose(mine.get_value(), other.get_value(), rtol=0, atol=1e-6)


@pytest.mark.slow  # the engine on a mesh and the trainer scan theirs
def test_a_scanned_stack_on_a_mesh_gives_the_logits_of_one_device(tmp_path):
  scanned = dict(num_hidden_layers=3, full_attn_layers=(2, 3), attn_res_block_size=2)
  config = k3_config_json(**SHAPE | scanned, **IDS)
  directory = write_checkpoint(tmp_path, config, seed=12, dtype="f32")
  ids, segments = batch()

  def logits(model):
    assert model.plan.repeats == 2
    empty = model.init_cache(B, T)
    return jax.jit(lambda ids, segments: model(ids, empty, segments)[0])(ids, segments)

  want = logits(decoder(directory, scan_layers=True))
  got = logits(decoder(directory, "fsdp2_tp2_ep2", scan_layers=True))
  valid = np.asarray(segments) != 0
  np.testing.assert_allclose(got[valid], want[valid], rtol=0, atol=1e-5 * np.abs(want[valid]).max())
