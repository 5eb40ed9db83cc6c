"""`python -m MaxText.train` on 8 simulated devices: the losses of one device, saves, restores, failures."""

import contextlib
import functools
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.configs import loader
from MaxText.configs.options import TrainOptions
from MaxText.models.sharding import build_layout
from MaxText.train import main
from MaxText.training.model import TrainedDecoder

pytestmark = [pytest.mark.train, pytest.mark.usefixtures("kept_programs")]

ROOT = Path(__file__).parents[2]
# a dense linear layer and a full one with experts, each in a block of the residual stream of its own
TWO = "base_num_decoder_layers=2 full_attn_layers=[2] attn_res_block_size=1".split()
# a dense layer, two linear ones that the scan runs, a full one
FOUR = "base_num_decoder_layers=4 full_attn_layers=[4] attn_res_block_size=2 scan_layers=true".split()
WIDTHS = "base_emb_dim=32 num_experts=8 kda_head_dim=16".split()
SMALL = [*TWO, *WIDTHS, *"max_target_length=16 learning_rate=0.01 learning_rate_schedule_steps=20".split()]
STEPS = "steps=20 checkpoint_period=7".split()
# the same eight rows a step
ONE = "mesh=fsdp ici_fsdp_parallelism=1 per_device_batch_size=8".split()
MIXED = "mesh=cpu-8 per_device_batch_size=1".split()  # two devices along each of three axes
EXPERTS = [*MIXED, *"ici_fsdp_parallelism=1 ici_tensor_parallelism=1 ici_expert_parallelism=8".split()]
EXCHANGE = "moe_dispatch=ragged_all_to_all"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A directory for runs, and texts."""
  path = tmp_path_factory.mktemp("mesh")
  (path / "lines.jsonl").write_text("\n".join(json.dumps({"text": "word " * n}) for n in range(1, 40)))
  return path


def command(place, name, *arguments):
  """The arguments of a run; a key that they give replaces that of the small model."""
  data = [f"grain_train_files={place}/lines.jsonl", f"base_output_directory={place}", f"run_name={name}"]
  given = {argument.partition("=")[0] for argument in arguments}
  return ["kimi-k3-tiny", *(word for word in SMALL if word.partition("=")[0] not in given), *data, *arguments]


@pytest.fixture(scope="module")
def train(place):
  """Runs the command in this process, and returns the directory of the run."""

  def run(name, *arguments):
    assert main(command(place, name, *arguments)) == 0
    return place / name

  return run


@pytest.fixture(scope="module")
def one(train):
  return train("one", *ONE, *STEPS)


@pytest.fixture(scope="module")
def mixed(train):
  return train("mixed", *MIXED, *STEPS)


def losses(run):
  return [json.loads(line)["learning/lm_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@functools.cache
def weights(run):
  return jax.tree.map(np.asarray, ParameterTree(load_params(run, loader.load(run), progress=False)).values)


def biases(run):
  (bias,) = [value for path, value in weights(run).items() if path.endswith("e_score_correction_bias")]
  return bias


def back_to_7(run, name):
  """Copies a run as it was when its checkpoint 7 was the last."""
  copy = shutil.copytree(run, run.with_name(name))
  for checkpoint in (copy / "checkpoints").iterdir():
    if checkpoint.name != "7":
      shutil.rmtree(checkpoint)
  return copy


# --- the same numbers -------------------------------------------------------------------------------------


def assert_equal_to_one_device(run, one):
  np.testing.assert_allclose(losses(run), losses(one), rtol=1e-5)
  assert len(losses(run)) == 20 and losses(run)[-1] < losses(run)[0] - 2
  np.testing.assert_array_equal(biases(run), biases(one))
  assert np.any(biases(one))


def test_twenty_steps_on_three_axes_have_the_losses_and_router_biases_of_one_device(one, mixed):
  assert_equal_to_one_device(mixed, one)


@pytest.mark.slow  # each compiles a training program for eight devices
@pytest.mark.parametrize(
  "name, arguments",
  [
    ("mixed-exchange", [*MIXED, EXCHANGE]),
    ("experts-local", EXPERTS),
    ("experts-exchange", [*EXPERTS, EXCHANGE]),
    ("all-fsdp", ["per_device_batch_size=1"]),
  ],
)
def test_every_mesh_and_dispatch_has_the_losses_and_router_biases_of_one_device(train, one, name, arguments):
  assert_equal_to_one_device(train(name, *arguments, *STEPS), one)


@pytest.mark.slow  # two training programs more
def test_gradients_accumulated_on_a_mesh_are_those_of_one_device(train):
  parts = ["gradient_accumulation_steps=2", "steps=5"]
  alone = train("parts-one", *ONE, *parts)
  np.testing.assert_allclose(losses(train("parts-mixed", *MIXED, *parts)), losses(alone), rtol=1e-5)


@pytest.mark.slow  # two training programs more for each, of a deeper stack
@pytest.mark.parametrize(
  "optimizer, rounds, close",
  # muon makes every update as large as the next, so that rounding noise soon moves a code of an expert
  [("muon", "false", 1e-5), ("adamw", "true", 1e-5), ("muon", "true", 1e-3)],
)
def test_a_scanned_stack_has_the_losses_of_one_device(train, optimizer, rounds, close):
  deeper = [*FOUR, f"opt_type={optimizer}", f"mxfp4_qat={rounds}", "steps=20"]
  alone, mixed = (train(f"deep-{optimizer}-{rounds}-{len(where)}", *where, *deeper) for where in (ONE, MIXED))
  np.testing.assert_allclose(losses(mixed)[:5], losses(alone)[:5], rtol=1e-5)
  np.testing.assert_allclose(losses(mixed), losses(alone), rtol=close)
  assert losses(alone)[-1] < losses(alone)[0] - 2


# --- experts that have no room, and adapters ---------------------------------------------------------------


def test_a_capacity_counts_what_it_drops_and_routers_are_balanced_by_what_was_chosen():
  """All tokens choose the same four experts, of which four devices hold one each."""
  capacity = [EXCHANGE, "moe_capacity_factor=1.0", "expert_weights=dequantized", "scan_layers=false"]
  cfg, options = loader.load_command("kimi-k3-tiny", [*SMALL, *EXPERTS, *capacity], TrainOptions)
  chosen, tokens = cfg.num_experts_per_tok, 8 * 16
  model = TrainedDecoder(cfg, build_layout(loader.load_training_mesh(options)), rngs=nnx.Rngs(0))
  gate = model.decoder.layers[1].block_sparse_moe.gate
  gate.e_score_correction_bias.set_value(jnp.float32([2.0] * chosen + [0.0] * (8 - chosen)))

  @jax.jit
  def step(state, ids):
    model = nnx.merge(graph, state, copy=True)
    before = model.decoder.layers[1].block_sparse_moe.gate.e_score_correction_bias[...]
    model(ids)
    measured = model.settle_experts(0.25)
    return measured, model.decoder.layers[1].block_sparse_moe.gate.e_score_correction_bias[...] - before

  graph, state = nnx.split(model)
  measured, moved = step(state, jnp.arange(tokens).reshape(8, 16))
  room = tokens // 8 * chosen  # rows that a device's own tokens choose
  assert measured["moe/dropped_rows"] == chosen * (tokens - room)
  assert measured["moe/busiest_expert"] == 8 / chosen
  np.testing.assert_array_equal(moved, [-0.25] * chosen + [0.25] * (8 - chosen))


@pytest.mark.slow  # a training program more
def test_what_is_dropped_in_training_is_recorded(train):
  run = train("dropped", *EXPERTS, EXCHANGE, "moe_capacity_factor=1.0", "steps=2")
  lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  assert all(line["moe/dropped_rows"] > 0 and line["learning/lm_loss"] < 8 for line in lines)


@pytest.mark.slow  # three training programs more
@pytest.mark.parametrize("kind", ["shared_a", "per_expert"])
def test_adapters_train_on_a_mesh_as_on_one_device(train, one, kind):
  lora = [
    "lora_rank=4",
    "lora_targets=self_attn,experts",
    f"lora_experts={kind}",
    f"checkpoint={one}",
    "steps=6",
  ]
  alone = train(f"lora-{kind}-one", *ONE, *lora)
  for dispatch in ("local_experts", "ragged_all_to_all"):
    run = train(f"lora-{kind}-{dispatch}", *MIXED, f"moe_dispatch={dispatch}", *lora)
    np.testing.assert_allclose(losses(run), losses(alone), rtol=1e-5)
    assert losses(run)[-1] < losses(run)[0]


# --- saved here, restored there ---------------------------------------------------------------------------


@pytest.mark.slow  # on one device by default, in test_train.py
def test_a_run_that_went_on_upon_the_mesh_has_the_same_bits(train, mixed):
  back_to_7(mixed, "again")
  again = train("again", *MIXED, *STEPS)
  assert losses(again) == losses(mixed)
  assert all(np.array_equal(value, weights(mixed)[path]) for path, value in weights(again).items())


def test_a_run_saved_by_eight_devices_goes_on_upon_one(train, mixed):
  back_to_7(mixed, "fewer")
  np.testing.assert_allclose(losses(train("fewer", *ONE, *STEPS)), losses(mixed), rtol=1e-5)


@pytest.mark.slow  # the other way by default
def test_a_run_saved_by_one_device_goes_on_upon_eight(train, one):
  back_to_7(one, "more")
  np.testing.assert_allclose(losses(train("more", *MIXED, *STEPS)), losses(one), rtol=1e-5)


# --- saves that fail --------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
def upon(event, arguments):
  if event == "open" and "14.orbax-checkpoint-tmp/items.orbax-checkpoint-tmp/_METADATA" in str(arguments[0]):
    os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(upon)
from MaxText.train import main
main(sys.argv[1:])
"""


@pytest.mark.slow  # a process of its own that compiles, dies, and goes on
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it_and_the_run_goes_on(place, train, one):
  back_to_7(one, "killed")
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
  }
  arguments = command(place, "killed", *ONE, *STEPS)
  done = subprocess.run(
    [sys.executable, "-c", KILLED, *arguments], env=environment, capture_output=True, timeout=400
  )
  assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
  left = place / "killed/checkpoints"
  assert {path.name for path in left.iterdir()} == {"7", "14.orbax-checkpoint-tmp"}
  assert sum(file.stat().st_size for file in (left / "14.orbax-checkpoint-tmp").rglob("*")) > 100_000
  early = weights(place / "killed")
  assert all(np.array_equal(value, early[path]) for path, value in weights(one / "checkpoints/7").items())
  weights.cache_clear()
  assert losses(train("killed", *ONE, *STEPS)) == losses(one)


@contextlib.contextmanager
def no_room():
  """Refuses what lies further than 100 KB into any file, as a full disk would; keeps no program."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  kept = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", kept)


def test_a_disk_without_room_is_one_line_and_the_checkpoint_before_it_is_whole(place, one, capfd, caplog):
  back_to_7(one, "full")
  capfd.readouterr()
  with no_room():
    assert main(command(place, "full", *ONE, *STEPS)) == 2
  gc.collect()
  *steps, line = capfd.readouterr().err.splitlines()
  assert all(step.startswith("step ") for step in steps)
  assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]
  reason = "a checkpoint cannot be saved: [Errno 27] File too large; checkpoint 7 is whole"
  assert line == f"error: {place}/full/checkpoints/: {reason}"
  early = weights(place / "full")
  assert all(np.array_equal(value, early[path]) for path, value in weights(one / "checkpoints/7").items())


# --- what is said, and what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
  "arguments, words",
  [
    (
      ["mesh=cpu-8", *"ici_fsdp_parallelism=1 ici_expert_parallelism=1 ici_tensor_parallelism=8".split()],
      "ici_tensor_parallelism=8: heads of 4 ",
    ),
    (["mesh=cpu-8", "ici_data_parallelism=2"], "mesh cpu-8: needs 16 devices (data 2 x fsdp 2 x expert 2 x "),
    (
      ["ici_tensor_parallelism=3"],
      "ici_tensor_parallelism=3 does not divide 8 devices; nearest products that do: 2",
    ),
    (["mesh=cpu8"], "mesh: cpu8: no such file or mesh, did you mean 'cpu-8'?"),
    (
      ["ici_context_parallelism=2"],
      "ici_context_parallelism: a key of maxtext that this decoder does not read",
    ),
    (["logical_axis_rules=[]"], "logical_axis_rules: a key of maxtext that this decoder does not read"),
    ([*MIXED, "moe_capacity_factor=1.0"], "moe_capacity_factor: local_experts drops nothing"),
  ],
)
def test_what_does_not_fit_is_one_line_and_makes_no_directory(place, arguments, words, capfd):
  assert main(command(place, "refused", *arguments)) == 2
  line = capfd.readouterr().err
  assert line.startswith("error: ") and line.count("\n") == 1 and words in line
  assert not (place / "refused").exists()
