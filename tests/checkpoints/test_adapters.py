"""Adapters alone on disk: the same in any layout, whole or not at all, and refused where they do not fit."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from MaxText.checkpoints.adapters import load_adapters, save_adapters
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.write import save_published
from MaxText.common.errors import CheckpointError
from MaxText.layers.lora import LoRAParam
from MaxText.models import registry
from MaxText.models.adapters import attach
from tests.small import k3_config

SMALL = dict(num_hidden_layers=5, full_attn_layers=(2, 4), first_k_dense_replace=1)
LORA = dict(
  lora_rank=2, lora_alpha=6.0, lora_targets=("self_attn", "experts", "up_proj"), lora_experts="per_expert"
)


def zeros(cfg):
  """A decoder of zeros, without drawing anything."""
  tree = ParameterTree(registry.abstract(cfg))
  return tree.merge({path: jnp.zeros(value.shape, value.dtype) for path, value in tree.values.items()})


def small(scan, **ours):
  return zeros(k3_config(SMALL, scan_layers=scan, **ours))


def adapters_of(model):
  """Name with the layer's number -> values."""
  tree = ParameterTree(model)
  return {
    name: np.asarray(tree.values[path][row or ...])
    for name, path, row in tree.numbered()
    if path.endswith((".a", ".b"))
  }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """An unrolled decoder with adapters of known values, and their file."""
  model = small(False)
  cfg = model.cfg.model_copy(update=LORA)
  attach(model, cfg, nnx.Rngs(0))
  state = nnx.state(model, LoRAParam)
  for n, (_, variable) in enumerate(nnx.to_flat_state(state)):
    variable.set_value(jnp.full_like(variable[...], n + 1))
  nnx.update(model, state)
  path = tmp_path_factory.mktemp("adapters") / "new" / "adapter.safetensors"
  save_adapters(model, cfg, path)
  return model, path


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_a_file_restores_into_either_layout(saved, scan):
  source, path = saved
  model = small(scan)
  assert bool(model.plan.repeats) == scan
  cfg = load_adapters(model, path)
  assert {key: getattr(cfg, key) for key in LORA} == LORA
  got, want = adapters_of(model), adapters_of(source)
  assert got.keys() == want.keys() and len(got) > 40
  for name, values in want.items():
    np.testing.assert_array_equal(got[name], values, name)
  assert model.layers[0].self_attn.q_proj.lora.scale == 3.0


def test_the_file_holds_the_adapters_and_nothing_else(saved):
  source, path = saved
  with safe_open(path, framework="numpy") as file:
    names, about = set(file.keys()), json.loads(file.metadata()["about"])
  assert names == set(adapters_of(source))
  assert about["lora_targets"] == list(LORA["lora_targets"]) and about["lora_rank"] == 2
  assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_loading_again_replaces_the_values_of_the_same_adapters(saved):
  model = small(False)
  load_adapters(model, saved[1])
  load_adapters(model, saved[1])
  np.testing.assert_array_equal(
    adapters_of(model)["layers.0.self_attn.q_proj.lora.b"],
    adapters_of(saved[0])["layers.0.self_attn.q_proj.lora.b"],
  )


def test_a_published_export_holds_what_the_adapters_add(saved, tmp_path):
  source, _ = saved
  save_published(source, source.cfg, tmp_path / "out", progress=False)
  got = load_params(tmp_path / "out", source.cfg, progress=False).layers[0].self_attn.q_proj.weight[...]
  lora = source.layers[0].self_attn.q_proj.lora
  want = 3.0 * np.asarray(lora.b[...]) @ np.asarray(lora.a[...])
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert not source.layers[0].self_attn.q_proj.weight[...].any()


def refused(model, path, message):
  with pytest.raises(CheckpointError, match=message) as caught:
    load_adapters(model, path)
  assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_one_line(saved, tmp_path):
  _, path = saved
  refused(small(False, base_emb_dim=32), path, "another architecture: base_emb_dim 64 there, 32 here")
  refused(small(False), tmp_path / "nothing", "no such adapter file")
  damaged = tmp_path / "damaged"
  damaged.write_bytes(path.read_bytes()[:-9])
  refused(small(False), damaged, "unreadable as safetensors")
  other = small(False)
  attach(other, other.cfg.model_copy(update=LORA | {"lora_rank": 3}), nnx.Rngs(0))
  refused(other, path, r"lora\.a: expected \(3, 64\), got \(2, 64\)")
  with pytest.raises(CheckpointError, match="no adapters to save"):
    save_adapters(small(False), other.cfg, tmp_path / "none")
