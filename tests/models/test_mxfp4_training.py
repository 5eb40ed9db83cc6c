"""A model trained through the MXFP4 grid computes what its packed export will."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.checkpoints.write import save_published
from MaxText.common.errors import ConfigError
from MaxText.configs.loader import load as load_config
from MaxText.layers.latent_moe import Experts
from tests.models.conftest import load
from tests.models.test_laws import ids, row
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


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_checkpoint_of_training_is_restored_on_the_grid_and_for_training_as_it_is(
  k3_directory, tmp_path, scan_layers
):
  model = moved_off_the_grid(load(k3_directory, **TRAINING))
  save_published(model, model.cfg, tmp_path / "export", progress=False)
  save_orbax(model, tmp_path / "orbax")
  held = lambda name, **ours: (
    ParameterTree(
      load_params(
        tmp_path / name,
        model.cfg.model_copy(update=dict(scan_layers=scan_layers, mxfp4_qat=False) | ours),
        progress=False,
      )
    ).values
  )
  for weights in ("packed", "dequantized"):
    want, got = (held(name, expert_weights=weights) for name in ("export", "orbax"))
    assert want.keys() == got.keys()
    assert any(path.endswith("w1_packed") for path in want) == (weights == "packed")
    jax.tree.map(np.testing.assert_array_equal, got, want)
  if not scan_layers:
    jax.tree.map(np.testing.assert_array_equal, held("orbax", **TRAINING), ParameterTree(model).values)


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
