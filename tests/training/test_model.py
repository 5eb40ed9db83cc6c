"""The model that maxtext trains is the one that decodes: same loss, same probabilities, nothing leaks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.models.test_sharding import mesh_config
from tests.reference.generator import k3_config_json, write_checkpoint

grain = pytest.importorskip(
  "grain", reason="the packages of training are not installed; pip install '.[train]'"
)

from MaxText.checkpoints.load import load_params  # noqa: E402
from MaxText.configs import loader  # noqa: E402
from MaxText.configs.options import TrainOptions  # noqa: E402
from MaxText.models.sharding import build_layout  # noqa: E402
from MaxText.training import compat, data, run  # noqa: E402
from MaxText.training.keys import maxtext_keys  # noqa: E402
from MaxText.training.maxtext_modules import maxtext_module  # noqa: E402
from MaxText.training.model import RouterBias, TrainedDecoder  # noqa: E402
from MaxText.training.optimizer import muon_dimensions  # noqa: E402

LENGTHS = [1, 2, 3, 63, 64, 65]  # tokens of the documents; a chunk of linear attention has 64
END = 63
# a dense linear layer, a linear one and a full one with experts
K3 = dict(num_hidden_layers=3, full_attn_layers=(3,), hidden_size=48, vocab_size=64)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  config = k3_config_json(**K3, bos_token_id=61, eos_token_id=62, pad_token_id=END)
  return write_checkpoint(tmp_path_factory.mktemp("k3"), config, seed=3, dtype="f32", packed=False)


@pytest.fixture(scope="module")
def cfg(directory):
  return loader.load(directory, ["scan_layers=false"])


@pytest.fixture(scope="module")
def model(cfg, directory):
  layout = build_layout(mesh_config("fsdp", fsdp=1))
  model = TrainedDecoder(cfg, layout, rngs=nnx.Rngs(0))
  nnx.update(model, run._initial_weights(cfg, str(directory), layout))
  return model


@pytest.fixture(scope="module")
def documents():
  draw = np.random.default_rng(0)
  return [np.array([*draw.integers(0, 60, n - 1), END], np.int32) for n in LENGTHS]


def packed(documents, length, batch=1):
  order = grain.MapDataset.source(documents)
  rows = data.PackedRows(order, length, 0, {"documents": len(documents)})
  return [jax.tree.map(jnp.asarray, each) for each in data.shuffled_batches(rows, batch, 1, 0)]


def alone(documents):
  """One document a row, behind it padding."""
  ids, segments = np.zeros((2, len(documents), max(LENGTHS)), np.int32)
  for row, document in enumerate(documents):
    ids[row, : len(document)], segments[row, : len(document)] = document, 1
  return jax.tree.map(jnp.asarray, data.as_batch(ids, segments))


@partial(jax.jit, static_argnums=0)
def call(graph, state, ids, segment_ids):
  """Logits, and the state that the call leaves."""
  model = nnx.merge(graph, state, copy=True)
  return model(ids, None, segment_ids), nnx.state(model)


def summed_loss(decoder, batch):
  """Sum of -log p of the targets that count, written out without maxtext and without the adapter."""
  logits, _ = decoder(batch["inputs"], None, batch["inputs_segmentation"])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
  return jnp.sum(jnp.where(batch["targets_segmentation"] != 0, losses, 0))


def loss_and_gradients(model, batch):
  graph, params, rest = nnx.split(model.decoder, nnx.Param, ...)
  loss = lambda params: summed_loss(nnx.merge(graph, params, rest, copy=True), batch)
  value, gradients = jax.jit(jax.value_and_grad(loss))(params)
  return float(value), {path: np.asarray(g[...]) for path, g in nnx.to_flat_state(gradients)}


def test_packed_documents_have_the_loss_and_every_gradient_of_separate_ones(model, documents):
  (together,) = packed(documents, sum(LENGTHS) - 1)
  loss, gradients = loss_and_gradients(model, together)
  wanted_loss, wanted = loss_and_gradients(model, alone(documents))
  assert loss == pytest.approx(wanted_loss, rel=1e-5)
  assert gradients.keys() == wanted.keys()
  for path, gradient in gradients.items():
    scale = np.abs(wanted[path]).max()
    # the first mixture has one source to choose from
    assert (scale > 0) != (path[:3] == ("layers", 0, "self_attention_res")), path
    np.testing.assert_allclose(gradient, wanted[path], rtol=0, atol=1e-4 * scale, err_msg=str(path))


@pytest.mark.train
def test_maxtexts_loss_is_the_mean_cross_entropy_of_what_counts(model, cfg, documents, tmp_path):
  options = loader.load_command("kimi-k3-tiny", ["max_target_length=70"], TrainOptions)[1]
  mesh = loader.load_training_mesh(options)
  config = compat.build_config(cfg, maxtext_keys(cfg, options, mesh, {}, tmp_path))
  batch = packed(documents, 70, batch=3)[0]
  graph, state = nnx.split(model)
  loss_fn = maxtext_module("trainers.pre_train.train").loss_fn
  loss, aux = jax.jit(
    lambda state, batch: loss_fn(nnx.merge(graph, state), config, dict(batch), None, None, is_train=False)
  )(state, batch)
  counted = int((batch["targets_segmentation"] != 0).sum())
  graph, state = nnx.split(model.decoder)
  wanted = jax.jit(lambda state: summed_loss(nnx.merge(graph, state), batch))(state) / counted
  assert aux["total_weights"] == counted == sum(LENGTHS) - len(LENGTHS)
  assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_log_probabilities_of_training_are_those_of_cached_decoding(model, cfg, directory, documents):
  ids = jnp.asarray(documents[-1][None, :12])
  trained = jax.nn.log_softmax(call(*nnx.split(model), ids, jnp.ones_like(ids))[0])
  decoder = load_params(directory, cfg, progress=False)
  cache, steps = decoder.init_cache(1, 12), []
  step = jax.jit(lambda token, cache: decoder(token, cache))
  for i in range(12):
    logits, cache = step(ids[:, i : i + 1], cache)
    steps.append(logits)
  np.testing.assert_allclose(jax.nn.log_softmax(jnp.concatenate(steps, axis=1)), trained, atol=1e-4)


# --- routers ------------------------------------------------------------------------------------------------


def test_no_optimizer_reaches_a_routers_bias(model):
  kinds = {".".join(map(str, path)): type(variable) for path, variable in nnx.to_flat_state(nnx.state(model))}
  biases = [path for path in kinds if path.endswith("e_score_correction_bias")]
  assert len(biases) == 2
  assert all(issubclass(kinds[path], RouterBias) for path in biases)
  assert not issubclass(RouterBias, nnx.Param)


def test_counts_add_up_over_calls_and_move_each_bias_once(model, documents):
  trained = nnx.clone(model)
  (batch,) = packed(documents, sum(LENGTHS) - 1)
  for _ in range(2):
    nnx.update(trained, call(*nnx.split(trained), batch["inputs"], batch["inputs_segmentation"])[1])
  counts = trained.expert_counts[...]
  assert (
    counts.sum(axis=1).tolist() == [2 * batch["inputs"].size * trained.decoder.cfg.num_experts_per_tok] * 2
  )
  before = trained.decoder.layers[1].block_sparse_moe.gate.e_score_correction_bias[...]
  busiest = trained.settle_experts(0.25)["moe/busiest_expert"]
  after = trained.decoder.layers[1].block_sparse_moe.gate.e_score_correction_bias[...]
  step = np.sign(float(jnp.mean(counts[0])) - np.asarray(counts[0]))
  np.testing.assert_allclose(after - before, 0.25 * (step - step.mean()), atol=1e-6)
  assert busiest == pytest.approx(float((counts / counts.mean(axis=1, keepdims=True)).max()), rel=1e-6)
  assert not trained.expert_counts[...].any()


# --- muon ---------------------------------------------------------------------------------------------------

ADAM = {"scale", "A_log", "dt_bias", "proj", "embedding"}  # last names of what is no matrix
ADAM_OWNERS = {"lm_head", "b_proj", "qkv_conv1d"}


@pytest.mark.parametrize("scan", ["true", "false"])
def test_muon_takes_every_matrix_inside_the_layers_and_nothing_else(scan):
  cfg = loader.load("kimi-k3-tiny", [f"scan_layers={scan}", "expert_weights=dequantized"])
  layout = build_layout(mesh_config("fsdp", fsdp=1))
  abstract = nnx.eval_shape(lambda: TrainedDecoder(cfg, layout, rngs=nnx.Rngs(0)))
  flat = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
  for path, variable in flat:
    dimensions = muon_dimensions(path, variable.shape)
    is_adams = path[-1] in ADAM or path[-2] in ADAM_OWNERS
    assert (dimensions is None) == is_adams, path
    if dimensions is not None:
      inputs = [variable.shape[axis] for axis in dimensions.reduction_axis]
      assert inputs == [variable.shape[-1]]  # weights are stored [.., out, in]
  heads = next(v for p, v in flat if p[-1] == "k_up")
  assert muon_dimensions(("k_up",)).output_axis == (-3, -2) and heads.ndim in (3, 4)


def test_a_stack_of_matrices_is_orthogonalised_one_by_one():
  stack = {"w1": jax.random.normal(jax.random.key(0), (2, 3, 8, 4))}
  rows = {f"{i}{j}": stack["w1"][i, j] for i in range(2) for j in range(3)}

  def update(tree):
    dimensions = {key: muon_dimensions(("experts", "w1")) for key in tree}
    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=dimensions)
    return muon.update(tree, muon.init(tree))[0]

  together, alone_ = update(stack), update(rows)
  for name, matrix in alone_.items():
    np.testing.assert_allclose(together["w1"][int(name[0]), int(name[1])], matrix, atol=1e-5)
  np.testing.assert_allclose(jnp.linalg.svd(matrix)[1], 1, atol=0.4)
