"""A model trained through the MXFP4 grid computes what its packed export will."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from MaxText.checkpoints import orbax_io
from MaxText.checkpoints.directory import RUN_FILE, write_companions, write_orbax_file
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.checkpoints.write import save_published
from MaxText.common.errors import ConfigError
from MaxText.configs.loader import load as load_config
from MaxText.layers.latent_moe import Experts
from MaxText.models.adapters import attach
from MaxText.models.sharding import build_layout, parameter_shardings
from tests.models.conftest import load
from tests.models.test_laws import ids, row
from tests.models.test_sharding import mesh_config
from tests.small import k3_config

TRAINING = dict(expert_weights="dequantized", mxfp4_qat=True)


def logits(model, batch):
  graph, state = nnx.split(model)
  return jax.jit(lambda state, i, s: nnx.merge(graph, state)(i, None, s)[0])(state, *batch)


def moved_off_the_grid(model):
  """Experts as an optimizer leaves them: between the codes."""
  for layer in model.layers:
    if hasattr(layer, "block_sparse_moe"):
      for name in ("w1", "w3", "w2"):
        weight = getattr(layer.block_sparse_moe.experts, name)
        noise = np.random.default_rng(0).normal(0, 0.1 * float(weight[...].std()), weight[...].shape)
        weight.set_value(weight[...] + noise.astype(np.float32))
  return model


def test_forward_in_training_equals_the_packed_export(k3_directory, tmp_path):
  model = moved_off_the_grid(load(k3_directory, **TRAINING))
  batch = row(ids(0, 17))
  got = logits(model, batch)
  save_published(model, model.cfg, tmp_path / "export", progress=False)
  packed = load_params(tmp_path / "export", model.cfg.model_copy(update={"expert_weights": "packed"}))
  experts = packed.layers[1].block_sparse_moe.experts
  assert experts.w1_packed[...].dtype == np.uint8
  np.testing.assert_allclose(got, logits(packed, batch), rtol=0, atol=2e-6 * float(np.abs(got).max()))


def held(path, cfg, mesh_shardings=None, **ours):
  """Parameters of a checkpoint by path."""
  cfg = cfg.model_copy(update={"mxfp4_qat": False, **ours})
  return ParameterTree(load_params(path, cfg, mesh_shardings=mesh_shardings, progress=False)).values


def assert_same_values(got, want):
  assert got.keys() == want.keys()
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope="module")
def trained(k3_directory, tmp_path_factory):
  """Configuration of a model whose experts an optimizer moved, and where its export and checkpoints lie."""
  place = tmp_path_factory.mktemp("qat")
  model = moved_off_the_grid(load(k3_directory, **TRAINING))
  save_published(model, model.cfg, place / "export", progress=False)
  save_orbax(model, place / "unrolled")
  scanned = model.cfg.model_copy(update={"scan_layers": True})
  save_orbax(load_params(place / "unrolled", scanned, progress=False), place / "scanned")
  assert_same_values(held(place / "scanned", model.cfg, **TRAINING), ParameterTree(model).values)
  return model.cfg, place


@pytest.mark.parametrize("stored", ["unrolled", "scanned"])
@pytest.mark.parametrize(
  "ours",
  [
    dict(expert_weights="packed"),
    dict(expert_weights="packed", scan_layers=True),
    dict(expert_weights="dequantized"),
    dict(expert_weights="dequantized", scan_layers=True, weight_dtype="bfloat16"),
  ],
  ids=str,
)
def test_a_checkpoint_of_training_is_restored_as_its_export(trained, stored, ours):
  cfg, place = trained
  want, got = (held(place / name, cfg, **ours) for name in ("export", stored))
  assert any(path.endswith("w1_packed") for path in want) == (ours["expert_weights"] == "packed")
  assert_same_values(got, want)


def test_devices_get_their_parts_of_rounded_experts(trained):
  cfg, place = trained
  layout = build_layout(mesh_config(fsdp=1, expert=8, tensor=1))
  shardings = functools.partial(parameter_shardings, layout)
  want, got = (
    held(place / name, cfg, sharding, expert_weights="packed")
    for name, sharding in (("export", None), ("scanned", shardings))
  )
  experts = [value for path, value in got.items() if path.endswith("w1_packed")]
  assert experts and all(len(value.sharding.device_set) == 8 for value in experts)
  assert_same_values(got, want)


def save_run(model, cfg, directory):
  """As the trainer leaves it, with one checkpoint and without the optimizer."""
  values = {f"params.params.decoder.{path}": value for path, value in ParameterTree(model).values.items()}
  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
    checkpointer.save(directory / "checkpoints/1/items", args=ocp.args.StandardSave(orbax_io._nested(values)))
  write_companions(directory, cfg, None)
  write_orbax_file(directory, RUN_FILE, cfg)


@pytest.mark.parametrize("target, is_plain", [("experts", True), ("self_attn", False)])
def test_experts_below_adapters_are_rounded_and_plain_only_where_adapters_merge(
  trained, tmp_path, target, is_plain
):
  cfg, place = trained
  model = load_params(place / "unrolled", cfg, progress=False)
  lora = dict(lora_rank=2, lora_alpha=2.0, lora_targets=(target,), lora_experts="shared_a")
  adapted = cfg.model_copy(update=lora)
  attach(model, adapted, nnx.Rngs(0))
  save_run(model, adapted, tmp_path / "run")
  read = held(tmp_path / "run", cfg, expert_weights="packed")
  assert any(path.endswith(".experts.w1") for path in read) == is_plain
  masters = held(tmp_path / "run", adapted, **TRAINING)
  assert_same_values(masters, ParameterTree(model).values)
  # other training that begins with this run begins with what its adapters were trained beside
  base, grid = held(tmp_path / "run", cfg, **TRAINING), held(place / "export", cfg, **TRAINING)
  assert_same_values({path: base[path] for path in grid}, grid)


def test_a_stack_of_experts_rounds_the_layer_in_use():
  cfg = k3_config(**TRAINING, expert_quantization="mxfp4")
  layers = [Experts(cfg, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
  stack = Experts(cfg, rngs=nnx.Rngs(2))
  for name in ("w1", "w3", "w2"):
    getattr(stack, name).set_value(jnp.stack([getattr(layer, name)[...] for layer in layers]))
  z = jax.random.normal(jax.random.key(0), (6, cfg.expert_input_dim))
  picks, weights = jnp.arange(12).reshape(6, 2) % cfg.num_experts, jnp.full((6, 2), 0.5)
  got, _ = stack(z, picks, weights, None, row=jnp.int32(1))
  np.testing.assert_array_equal(got, layers[1](z, picks, weights, None)[0])


def test_models_without_mxfp4_experts_refuse_the_key():
  with pytest.raises(ConfigError, match="mxfp4_qat: true needs expert_quantization mxfp4, not none"):
    load_config("kimi-linear-48b-a3b", ["mxfp4_qat=true"])
