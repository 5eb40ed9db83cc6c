"""Orbax: the same tree back, restacked between depth layouts, never half a checkpoint."""

import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpoints import orbax_io, restack
from MaxText.checkpoints.directory import ORBAX_FILE, kind, stored_dtype
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.checkpoints.write import save_published
from MaxText.common.errors import CheckpointError
from tests.checkpoints.samples import assert_same_models, assert_same_tensors, config_of, tensors

LAYOUTS = ("scan_layers=true", "scan_layers=false")


@pytest.fixture(scope="module", params=LAYOUTS)
def stored(request, k3_directory, tmp_path_factory):
  """(Orbax checkpoint, what was saved) in both depth layouts."""
  loaded = load(k3_directory, config_of(k3_directory, request.param))
  target = tmp_path_factory.mktemp("orbax") / "checkpoint"
  save_orbax(loaded.model, target, manifest=loaded.manifest, companions=k3_directory)
  return target, loaded


def refusal(directory, cfg):
  with pytest.raises(CheckpointError) as caught:
    load(directory, cfg)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tree_restores_into_both_layouts(stored, k3_directory, layout):
  target, _ = stored
  wanted = load(k3_directory, config_of(k3_directory, layout)).model
  assert_same_models(load(target, config_of(target, layout)).model, wanted)


def test_another_dtype_and_unpacked_experts(stored, k3_directory):
  target, _ = stored
  asked = ("scan_layers=false", "expert_weights=dequantized", "dtype=bfloat16")
  wanted = load(k3_directory, config_of(k3_directory, *asked)).model
  assert_same_models(load(target, config_of(target, *asked)).model, wanted)


def test_export_restores_the_published_bytes(stored, k3_directory, tmp_path):
  target, _ = stored
  again = load(target, config_of(target))
  save_published(again.model, again.model.cfg, tmp_path / "out", manifest=again.manifest)
  assert_same_tensors(tmp_path / "out", k3_directory, without=("vision_tower.", "mm_projector."))


def test_the_report_counts_stored_bytes(stored):
  target, saved = stored
  report = load(target, config_of(target)).report
  assert report.bytes_by_dtype == saved.report.held_by_dtype and not report.skipped
  assert kind(target) == "orbax" and stored_dtype(target) == "float32"


def test_shardings_are_followed(stored):
  target, _ = stored
  cfg = config_of(target, "scan_layers=true")
  rows = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
  paths = ["embed_tokens.embedding", "layers.0.mlp.up_proj.weight"]
  sharded = load(target, cfg, mesh_shardings=dict.fromkeys(paths, rows)).model
  assert {ParameterTree(sharded).values[path].sharding for path in paths} == {rows}
  assert_same_models(sharded, load(target, cfg).model)


def test_kimi_linear_round_trip(kimi_linear_directory, tmp_path):
  loaded = load(kimi_linear_directory, config_of(kimi_linear_directory, "dtype=bfloat16"))
  save_orbax(loaded.model, tmp_path / "o", manifest=loaded.manifest)
  assert stored_dtype(tmp_path / "o") == "bfloat16"
  again = load(tmp_path / "o", config_of(tmp_path / "o", "dtype=bfloat16", "scan_layers=true"))
  save_published(again.model, again.model.cfg, tmp_path / "out", manifest=again.manifest)
  assert_same_tensors(tmp_path / "out", kimi_linear_directory)


def test_a_trained_model_has_no_published_source(kimi_linear_directory, tmp_path):
  cfg = config_of(kimi_linear_directory, "scan_layers=true")
  model = load(kimi_linear_directory, cfg).model
  save_orbax(model, tmp_path / "o")
  loaded = load(tmp_path / "o", cfg)
  assert_same_models(loaded.model, model)
  assert loaded.manifest is None
  save_published(loaded.model, cfg, tmp_path / "out", manifest=loaded.manifest, weight_dtype="float32")
  assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {np.dtype("float32")}


def test_another_architecture_is_refused(stored):
  target, _ = stored
  cfg = config_of(target).model_copy(update={"num_experts": 8, "kv_lora_rank": 64, "model_name": "mine"})
  assert refusal(target, cfg) == (
    f"{target.resolve()}: checkpoint of another architecture: kv_lora_rank 32 in the checkpoint, 64 in mine; "
    "num_experts 4 in the checkpoint, 8 in mine"
  )


def test_a_model_of_another_name_and_context_is_not_another_architecture(stored):
  target, saved = stored
  cfg = saved.model.cfg.model_copy(update={"model_name": "mine", "max_position_embeddings": 64})
  assert_same_models(load(target, cfg).model, saved.model)


def test_an_interrupted_save_leaves_nothing(k3_directory, tmp_path, monkeypatch):
  def fail(*_):
    raise OSError(28, "No space left on device")

  model = load(k3_directory, config_of(k3_directory)).model
  monkeypatch.setattr(orbax_io, "write_companions", fail)
  with pytest.raises(CheckpointError, match="o: cannot be written: .*No space left"):
    save_orbax(model, tmp_path / "o")
  assert list(tmp_path.iterdir()) == []


def test_arrays_without_the_closing_file_are_no_checkpoint(stored, tmp_path):
  target = shutil.copytree(stored[0], tmp_path / "o")
  (target / ORBAX_FILE).unlink()
  assert refusal(target, config_of(target)).startswith(f"{target}: no whole checkpoint: expected ")


def test_missing_arrays(stored, tmp_path):
  target = shutil.copytree(stored[0], tmp_path / "o")
  shutil.rmtree(target / "params")
  assert refusal(target, config_of(target)).startswith(f"{target.resolve()}/params: unreadable as an Orbax")


def test_damaged_arrays(stored, tmp_path):
  target = shutil.copytree(stored[0], tmp_path / "o")
  for file in (target / "params" / "d").iterdir():
    file.write_bytes(file.read_bytes()[:10])
  for layout in LAYOUTS:
    message = refusal(target, config_of(target, layout))
    assert message.startswith(f"{target.resolve()}/params: unreadable as an Orbax checkpoint: ")


def test_arrays_of_another_tree(stored, tmp_path, kimi_linear_directory):
  target = shutil.copytree(stored[0], tmp_path / "o")
  cfg = config_of(target).model_copy(update={"vocab_size": 97})
  content = json.loads((target / "config.json").read_text())
  content["text_config"]["vocab_size"] = 97
  (target / "config.json").write_text(json.dumps(content))
  assert refusal(target, cfg) == (
    f"{target.resolve()}/params: embed_tokens.embedding: expected (97, 64), got (96, 64)"
  )


def test_a_later_format_is_refused(stored, tmp_path):
  target = shutil.copytree(stored[0], tmp_path / "o")
  (target / ORBAX_FILE).write_text('{"format": 2}')
  assert refusal(target, config_of(target)) == f"{target.resolve()}/{ORBAX_FILE}: format 2, expected 1"


@pytest.mark.parametrize("content", ['{"format": 1}', '{"format": 1, "layout": {}, "manifest": null}'])
def test_an_incomplete_closing_file_is_refused(stored, tmp_path, content):
  target = shutil.copytree(stored[0], tmp_path / "o")
  (target / ORBAX_FILE).write_text(content)
  assert "expected manifest, and layout with dtype, " in refusal(target, config_of(target))
  with pytest.raises(CheckpointError, match="layout with dtype"):
    stored_dtype(target)


def test_restacking_in_many_batches(stored, k3_directory, monkeypatch):
  target, saved = stored
  monkeypatch.setattr(restack, "_BATCH_BYTES", 500_000)
  layout = "scan_layers=false" if saved.model.plan.repeats else "scan_layers=true"
  wanted = load(k3_directory, config_of(k3_directory, layout)).model
  assert_same_models(load(target, config_of(target, layout)).model, wanted)


def test_a_directory_with_content_is_not_touched(stored, tmp_path):
  (tmp_path / "mine").write_text("x")
  with pytest.raises(CheckpointError, match="is not empty; give overwrite=true"):
    save_orbax(stored[1].model, tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["mine"]
