"""`python -m MaxText.convert`: both ways, one line for a mistake, nothing half-written."""

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

from MaxText import convert
from MaxText.checkpoints.directory import kind, stored_dtype
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.checkpoints.reader import open_published
from MaxText.configs.loader import load as load_config
from MaxText.models import registry
from tests.checkpoints.samples import assert_same_tensors, config_of, write_k3

VISION = ("vision_tower.", "mm_projector.")


def run(*arguments) -> int:
  return convert.main([str(argument) for argument in arguments])


def failure(capsys, *arguments) -> str:
  """The one line of a refused command."""
  assert run(*arguments) == 2
  printed = capsys.readouterr()
  (line,) = printed.err.splitlines()[-1:]
  assert printed.out == "" and line.startswith("error: ")
  return line.removeprefix("error: ")


def test_published_to_orbax_and_back(k3_directory, tmp_path, capsys):
  vocabulary = k3_directory / "tiktoken.model"
  vocabulary.write_text("YQ== 0\n")
  assert run(k3_directory, tmp_path / "orbax", "scan_layers=true") == 0
  printed = capsys.readouterr().err
  totals = open_published(k3_directory).bytes_by_dtype()
  assert all(f"{dtype} {nbytes:,} B" for dtype, nbytes in totals.items() if dtype in printed)
  assert "6 vision tensors skipped" in printed
  assert kind(tmp_path / "orbax") == "orbax" and stored_dtype(tmp_path / "orbax") == "bfloat16"
  assert run(tmp_path / "orbax", tmp_path / "back", "max_shard_bytes=400000") == 0
  assert_same_tensors(tmp_path / "back", k3_directory, without=VISION)
  for name in ("config.json", "tiktoken.model"):
    assert filecmp.cmp(tmp_path / "back" / name, k3_directory / name, shallow=False)
  assert (tmp_path / "back" / "model.safetensors.index.json").is_file()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "orbax"]


def test_a_float32_checkpoint_stays_float32(tmp_path):
  directory = write_k3(tmp_path / "in", dtype="f32")
  assert stored_dtype(directory) == "float32"
  assert run(directory, tmp_path / "narrow", "weight_dtype=bfloat16") == 0
  assert stored_dtype(tmp_path / "narrow") == "bfloat16"
  assert run(tmp_path / "narrow", tmp_path / "wide", "weight_dtype=float32") == 0
  assert stored_dtype(tmp_path / "wide") == "float32"  # asked for, so it wins over the stored types


def test_plain_experts_are_rounded_with_a_word_or_kept(tmp_path, capsys):
  """As a run without `mxfp4_qat` leaves them: plain, without a published source."""
  source = write_k3(tmp_path / "source")
  for name, in_training in (("plain", False), ("rounded", True)):
    cfg = config_of(source, expert_weights="dequantized", mxfp4_qat=in_training)
    save_orbax(registry.build(cfg, nnx.Rngs(0)), tmp_path / name)
  said = {}
  for source, *arguments in (["plain"], ["plain", "expert_quantization=none"], ["rounded"]):
    assert run(tmp_path / source, tmp_path / "out", "overwrite=true", *arguments) == 0
    said[source, *arguments] = "rounded to MXFP4 on the way" in capsys.readouterr().err
    packed = any(name.endswith("_packed") for name in open_published(tmp_path / "out").entries)
    assert packed == (not arguments)
  assert list(said.values()) == [True, False, False]


def test_configurations_go_both_ways(k3_directory, tmp_path):
  assert run(k3_directory / "config.json", tmp_path / "model.yml") == 0
  assert run(tmp_path / "model.yml", tmp_path / "config.json") == 0
  stated, back = config_of(k3_directory), load_config(tmp_path / "config.json")
  assert back.model_copy(update={"model_name": stated.model_name}) == stated
  given, returned = (json.loads((folder / "config.json").read_text()) for folder in (k3_directory, tmp_path))
  assert keeps(returned, given)


def keeps(tree, part) -> bool:
  """Whether `tree` has every key of `part`, at every depth, with its value."""
  if isinstance(part, dict):
    return isinstance(tree, dict) and all(key in tree and keeps(tree[key], part[key]) for key in part)
  return tree == part


def test_mistakes_are_one_line(k3_directory, tmp_path, capsys):
  out = tmp_path / "out"
  assert failure(capsys, k3_directory).startswith("SRC and DST are missing")
  assert failure(capsys, tmp_path / "absent", out) == f"{tmp_path}/absent: no such file or directory"
  assert failure(capsys, k3_directory, out, "scan_layer=true").endswith("did you mean 'scan_layers'?")
  assert failure(capsys, k3_directory, out, "prompt=x").endswith("prompt: not a key of this command")
  assert failure(capsys, k3_directory, k3_directory).endswith("is the source itself")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "notes").touch()
  assert failure(capsys, k3_directory, tmp_path / "full").endswith("give overwrite=true to replace it")
  assert failure(capsys, k3_directory, k3_directory, "overwrite=true").endswith("is the source itself")
  assert failure(capsys, k3_directory, k3_directory.parent, "overwrite=true").endswith("would delete")
  assert failure(capsys, "kimi-k3-tiny", out).endswith("because kimi-k3-tiny holds no weights")
  (tmp_path / "mine.yml").write_text("x")
  assert failure(capsys, k3_directory, tmp_path / "mine.yml").endswith("give overwrite=true to replace it")
  assert not out.exists()


def test_a_damaged_source_leaves_nothing(tmp_path, capsys):
  directory = write_k3(tmp_path / "in")
  file = directory / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-1])
  assert "truncated" in failure(capsys, directory, tmp_path / "out")
  assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_help_says_what_can_be_converted(capsys):
  assert run("--help") == 0
  printed = capsys.readouterr().out
  for word in ("published directory", "Orbax checkpoint", ".yml", "overwrite=false", "max_shard_bytes="):
    assert word in printed
  assert all(len(line) <= 120 for line in printed.splitlines())


@pytest.mark.parametrize("arguments, status", [(["--help"], 0), (["only-one"], 2)])
def test_as_a_command(arguments, status):
  command = [sys.executable, "-m", "MaxText.convert", *arguments]
  done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
  assert done.returncode == status and "Traceback" not in done.stderr
