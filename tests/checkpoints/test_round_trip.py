"""Published directory -> decoder -> published directory gives every byte back."""

import filecmp
import json

import numpy as np
import pytest

from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load
from MaxText.checkpoints.reader import open_published
from MaxText.checkpoints.write import save_published
from MaxText.common.errors import CheckpointError
from MaxText.kernels.mxfp4 import MxFp4, unpack
from MaxText.models import registry
from tests.checkpoints.samples import (
  assert_same_models,
  assert_same_tensors,
  config_of,
  edit,
  oracle,
  tensors,
  write_k3,
  write_kimi_linear,
)

VISION = ("vision_tower.", "mm_projector.")


def round_trip(directory, target, *overrides, **options):
  cfg = config_of(directory, *overrides)
  loaded = load(directory, cfg)
  save_published(loaded.model, cfg, target, manifest=loaded.manifest, companions=directory, **options)
  assert json.loads((target / "config.json").read_text()) == json.loads(
    (directory / "config.json").read_text()
  )
  return loaded


@pytest.mark.parametrize("overrides", [(), ("scan_layers=true",), ("expert_weights=dequantized",)])
def test_the_oracle_comes_back_as_the_same_file(tmp_path, overrides):
  directory = oracle()
  round_trip(directory, tmp_path / "out", *overrides)
  for name in ("model.safetensors", "config.json"):
    assert filecmp.cmp(tmp_path / "out" / name, directory / name, shallow=False)


@pytest.mark.parametrize("overrides", [(), ("scan_layers=true", "dtype=bfloat16")])
def test_kimi_k3_comes_back(k3_directory, tmp_path, overrides):
  loaded = round_trip(k3_directory, tmp_path / "out", *overrides)
  assert_same_tensors(tmp_path / "out", k3_directory, without=VISION)
  assert len(loaded.report.skipped) == len(open_published(k3_directory).skipped) > 0


@pytest.mark.parametrize("overrides", [(), ("scan_layers=true", "dtype=bfloat16")])
def test_kimi_linear_comes_back(kimi_linear_directory, tmp_path, overrides):
  round_trip(kimi_linear_directory, tmp_path / "out", *overrides)
  assert_same_tensors(tmp_path / "out", kimi_linear_directory)


@pytest.mark.parametrize(
  "write, options",
  [
    (write_k3, {"conv_rank": 2, "prefix": "", "dtype": "f32", "packed": False}),
    (write_kimi_linear, {"conv_rank": 2, "prefix": "language_model.", "packed": True, "dtype": "f32"}),
  ],
)
def test_the_other_layouts_come_back(tmp_path, write, options):
  directory = write(tmp_path / "in", **options)
  round_trip(directory, tmp_path / "out", max_shard_bytes=300_000)
  assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
  open_published(tmp_path / "out")
  assert_same_tensors(tmp_path / "out", directory)


def test_names_without_any_prefix_come_back(tmp_path):
  directory = write_k3(tmp_path / "in")

  def strip(found):
    for name in list(found):
      found[name.removeprefix("language_model.").removeprefix("model.")] = found.pop(name)

  edit(directory, strip)
  round_trip(directory, tmp_path / "out")
  assert_same_tensors(tmp_path / "out", directory)


def test_half_precision_matrices_come_back(tmp_path):
  directory = write_k3(tmp_path / "in")

  def halve(found):
    for name in [name for name in found if name.endswith("o_proj.weight")]:
      found[name] = found[name].astype(np.float16)

  edit(directory, halve)
  assert "F16" in round_trip(directory, tmp_path / "out").report.bytes_by_dtype
  assert_same_tensors(tmp_path / "out", directory)


def test_experts_are_the_same_numbers_packed_and_dequantized(k3_directory):
  packed, plain = (
    ParameterTree(load(k3_directory, config_of(k3_directory, f"expert_weights={how}")).model).values
    for how in ("packed", "dequantized")
  )
  stems = [path.removesuffix("_packed") for path in packed if path.endswith("_packed")]
  assert len(stems) == 5 * 3
  for stem in stems:
    pair = MxFp4(np.asarray(packed[f"{stem}_packed"]), np.asarray(packed[f"{stem}_scale"]))
    np.testing.assert_array_equal(np.asarray(plain[stem]), unpack(pair, np.float32))


def test_plain_experts_of_an_mxfp4_model_stay_plain(tmp_path):
  directory = write_k3(tmp_path / "in")
  plain = write_k3(tmp_path / "plain", packed=False)
  (plain / "config.json").write_text((directory / "config.json").read_text())
  loaded = round_trip(plain, tmp_path / "out")
  assert loaded.model.cfg.expert_quantization == "mxfp4" and not loaded.model.cfg.packs_experts
  assert_same_tensors(tmp_path / "out", plain)


def test_plain_experts_are_packed_for_the_release_layout(tmp_path, k3_directory):
  loaded = load(k3_directory, config_of(k3_directory, "expert_weights=dequantized"))
  save_published(loaded.model, loaded.model.cfg, tmp_path / "out", weight_dtype="bfloat16")
  again = load(tmp_path / "out", config_of(tmp_path / "out", "expert_weights=dequantized")).model
  assert_same_models(again, loaded.model)
  assert {t.dtype.name for n, t in tensors(tmp_path / "out").items() if ".experts." in n} == {"uint8"}


def test_a_drawn_model_is_written_in_the_release_layout(tmp_path, k3_directory):
  cfg = config_of(k3_directory, "scan_layers=true")
  model = load(k3_directory, cfg).model
  save_published(model, cfg, tmp_path / "out")
  again = load(tmp_path / "out", cfg)
  assert_same_models(again.model, model)
  assert set(tensors(tmp_path / "out")) == set(open_published(k3_directory).entries)
  assert again.manifest.metadata == {"format": "pt"}
  name = "language_model.model.layers.0.self_attn.A_log"
  assert open_published(tmp_path / "out").entries[name].shape == (cfg.kda_head_dim,)


def test_a_directory_with_content_is_not_touched(tmp_path, k3_directory):
  model, cfg = load(k3_directory, config_of(k3_directory)).model, config_of(k3_directory)
  target = tmp_path / "out"
  target.mkdir()
  (target / "model.safetensors").write_text("an older export")
  with pytest.raises(CheckpointError) as caught:
    save_published(model, cfg, target)
  assert str(caught.value) == f"{target}: is not empty; give overwrite=true to replace it"
  assert (target / "model.safetensors").read_text() == "an older export"
  save_published(model, cfg, target, overwrite=True)
  assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_half_written_remains(tmp_path, k3_directory, monkeypatch):
  loaded = load(k3_directory, config_of(k3_directory))
  monkeypatch.setattr("MaxText.checkpoints.write._write_file", fail)
  with pytest.raises(CheckpointError, match="out: cannot be written: .*No space left"):
    save_published(loaded.model, loaded.model.cfg, tmp_path / "out")
  assert list(tmp_path.iterdir()) == []


def fail(*_):
  raise OSError(28, "No space left on device")


def test_a_file_is_no_target(tmp_path, k3_directory):
  cfg = config_of(k3_directory)
  (tmp_path / "out").write_text("x")
  with pytest.raises(CheckpointError, match="out: is a file, expected a directory or nothing"):
    save_published(registry.abstract(cfg), cfg, tmp_path / "out")


def test_a_full_disk_is_told_before_writing(tmp_path, k3_directory, monkeypatch):
  monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
  loaded = load(k3_directory, config_of(k3_directory))
  with pytest.raises(CheckpointError, match="out: needs [0-9,]+ bytes of disk, 1,000 are free"):
    save_published(loaded.model, loaded.model.cfg, tmp_path / "out")
  assert list(tmp_path.iterdir()) == []
