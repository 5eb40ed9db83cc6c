"""`python -m MaxText.train` as its user sees it: runs, goes on, stops, and says what is wrong in one line."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.configs import loader
from MaxText.models import registry
from MaxText.train import main

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "MaxText" / "assets" / "kimi-k3-tiny"
# a dense layer, two linear ones that the scan runs, a full one
SMALL = "base_num_decoder_layers=4 full_attn_layers=[4] attn_res_block_size=2 base_emb_dim=32".split()
# step 7 lies inside a window of rows, and later steps in other windows
WINDOW = "grain_shuffle_buffer_size=5"
STEPS = f"steps=12 {WINDOW} learning_rate_schedule_steps=12 max_target_length=32 learning_rate=0.01".split()

ONE_DEVICE = ["mesh=fsdp", "ici_fsdp_parallelism=1"]

pytestmark = [pytest.mark.train, pytest.mark.usefixtures("kept_programs")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
  """A directory for runs, with weights to start from, a broken set, and texts."""
  path = tmp_path_factory.mktemp("train")
  cfg = loader.load("kimi-k3-tiny", [*SMALL, "expert_weights=dequantized", "scan_layers=true"])
  model = registry.build(cfg, nnx.Rngs(0))
  tree = ParameterTree(model)
  broken = dict(tree.values)
  broken["cycles.0.self_attn.q_proj.weight"] = (
    broken["cycles.0.self_attn.q_proj.weight"].at[1, 2, 3].set(np.nan)
  )
  save_orbax(tree.merge(broken), path / "broken", companions=ASSETS)
  (path / "lines.jsonl").write_text("\n".join(json.dumps({"text": "word " * n}) for n in range(1, 40)))
  return path


def train(workplace, config, *arguments, command=main):
  """Runs the command in this process on one of its devices; returns its exit status and what it wrote."""
  given = [str(config), *ONE_DEVICE, *arguments]
  if not any(argument.startswith("base_output_directory") for argument in arguments):
    given.append(f"base_output_directory={workplace}")
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command(given)
  return subprocess.CompletedProcess(given, status, out.getvalue(), err.getvalue())


def train_anew(workplace, config, *arguments):
  """The same in a process of its own, which knows nothing of the runs before."""
  environment = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    "PYTHONPATH": str(ROOT),
  }
  given = [str(config), *ONE_DEVICE, *arguments, f"base_output_directory={workplace}"]
  command = [sys.executable, "-m", "MaxText.train", *given]
  return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


def losses(directory):
  lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
  return {int(line["step"]): line["learning/lm_loss"] for line in lines}


@pytest.fixture(scope="module")
def runs(workplace, kept_programs):
  """An unbroken run of twelve steps, and one that stopped after seven and went on."""
  given = [*SMALL, *STEPS, f"grain_train_files={workplace}/lines.jsonl"]
  stopped = [*given, "run_name=parts", "steps=7", "grain_worker_count=0"]
  done = {"first": train(workplace, "kimi-k3-tiny", *(word for word in stopped if word != "steps=12"))}
  done["rest"] = train_anew(workplace, "kimi-k3-tiny", *given, "run_name=parts")
  done["whole"] = train(workplace, "kimi-k3-tiny", *given, "run_name=whole")
  for process in done.values():
    assert process.returncode == 0, process.stderr[-2000:]
  return done


def test_a_person_can_read_the_progress(runs):
  lines = runs["whole"].stderr.splitlines()
  assert runs["whole"].stdout == ""
  assert [line.split()[:2] for line in lines[:12]] == [["step", f"{i}/12"] for i in range(1, 13)]
  assert all("tokens/s" in line and line.endswith("left") for line in lines[1:12])
  assert "run_name=whole" in lines[-1]


def test_a_run_that_went_on_saw_the_same_tokens_and_has_the_same_losses_and_weights(runs, workplace):
  whole, parts = workplace / "whole", workplace / "parts"
  assert losses(whole) == losses(parts) and len(losses(whole)) == 12
  assert losses(whole)[11] < losses(whole)[0] - 1
  positions = [
    json.loads(next((run / "checkpoints/11/iter").glob("*.json")).read_text()) for run in (whole, parts)
  ]
  assert positions[0] == positions[1] and positions[0]["window_index"] > 3
  cfg = loader.load(whole)
  one, other = (ParameterTree(load_params(run, cfg, progress=False)).values for run in (whole, parts))
  assert all(np.array_equal(one[path], other[path]) for path in one)
  assert any(np.any(one[path]) for path in one if path.endswith("e_score_correction_bias"))


def test_a_checkpoint_in_the_middle_is_read_too(runs, workplace):
  cfg = loader.load(workplace / "parts/checkpoints/6")
  early, late = (
    load_params(workplace / "parts" / name, cfg, progress=False) for name in ("checkpoints/6", ".")
  )
  assert not np.array_equal(early.lm_head.weight[...], late.lm_head.weight[...])


def refused(workplace, capfd, config, *arguments):
  """Runs the command in this process; returns the one line that it ends with."""
  status = main([str(config), *ONE_DEVICE, *arguments, f"base_output_directory={workplace}"])
  written = capfd.readouterr()
  assert (status, written.out) == (2, "")
  assert written.err.startswith("error: ") and written.err.count("\n") == 1, written.err
  return written.err


def test_a_run_that_is_complete_says_so(runs, workplace, capfd):
  data = f"grain_train_files={workplace}/lines.jsonl"
  line = refused(workplace, capfd, "kimi-k3-tiny", *SMALL, *STEPS, data, "run_name=whole")
  assert line.startswith("error: steps: Requested training up to step 12, but a checkpoint already exists")


def test_other_data_or_another_model_do_not_go_on(runs, workplace, capfd):
  more = [*SMALL, *STEPS[1:], "steps=14", "run_name=whole"]
  line = refused(workplace, capfd, "kimi-k3-tiny", *more, f"grain_train_files={ASSETS}/config.json")
  assert "the checkpoint was trained on other data: documents 39 then, 1 now" in line
  line = refused(workplace, capfd, "kimi-k3-tiny", *more[:3], "base_emb_dim=64", "run_name=whole")
  assert "a run of another architecture: base_emb_dim 32 then, 64 now" in line


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_parameter(workplace):
  done = train(
    workplace,
    workplace / "broken",
    *STEPS,
    f"grain_train_files={workplace}/lines.jsonl",
    "run_name=broken-run",
  )
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == (
    "error: step 1: the loss is nan: parameter cycles.0.self_attn.q_proj.weight holds 1 values of 8,192 "
    "that are no finite number\n"
  )
  assert not list((workplace / "broken-run").glob("checkpoints/[0-9]*"))


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["stpes=3"], "command line: stpes: unknown key, did you mean 'steps'?"),
    (["adam_ep=0.9"], "command line: adam_ep: unknown key, did you mean 'adam_eps'?"),
    (["steps=many"], "command line: steps: got 'many', expected a whole number > 0"),
    (["sparse_matmul=true"], "command line: sparse_matmul: a key of maxtext that this decoder does not read"),
    (
      ["grain_train_files=nothing/*.txt"],
      "grain_train_files: nothing/*.txt: no such file, directory or pattern",
    ),
    (["grain_train_files=empty.txt"], "grain_train_files: empty.txt: the file is empty"),
    (["max_target_length=5000"], "max_target_length: 5000 exceeds the model's max_position_embeddings 4096"),
    (["eval_interval=5"], "eval_interval: needs grain_eval_files, what to measure on"),
    (["run_name=broken"], "broken: holds a checkpoint and no run; give another run_name"),
    (["prompt=x"], "command line: prompt: not a key of this command"),
  ],
)
def test_a_mistake_is_one_line(workplace, arguments, message, capfd, monkeypatch):
  (workplace / "empty.txt").touch()
  monkeypatch.chdir(workplace)
  assert message in refused(workplace, capfd, "kimi-k3-tiny", *arguments)


def test_help_lists_the_keys_of_this_command(capfd):
  assert main(["--help"]) == 0
  written = capfd.readouterr()
  assert written.err == ""
  assert "opt_type=adamw" in written.out and "routed_bias_update_rate=1e-3" in written.out
  assert "max_new_tokens" not in written.out
