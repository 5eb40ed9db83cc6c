"""Strict accounting, dtypes, slices of shardings, the peak of a load."""

import json
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpoints import published, reader
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load, load_params
from MaxText.checkpoints.published import load_published
from MaxText.common.errors import CheckpointError
from MaxText.models import registry
from tests.checkpoints.samples import (
  assert_same_models,
  config_of,
  edit,
  edit_config,
  oracle,
  tensors,
  write_k3,
  write_kimi_linear,
)
from tests.reference.generator import k3_config_json, write_checkpoint

LAYER = "language_model.model.layers.1."
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.fixture
def directory(tmp_path):
  """A Kimi K3 in one file that a test may damage."""
  return write_k3(tmp_path / "k3", a_log_width=128)


def refusal(directory, cfg=None, **options):
  with pytest.raises(CheckpointError) as caught:
    load(directory, cfg or config_of(directory), progress=False, **options)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def header_totals(directory):
  totals = Counter()
  for file in directory.glob("*.safetensors"):
    with file.open("rb") as opened:
      header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    for entry in header.values():
      if "dtype" in entry:
        totals[entry["dtype"]] += entry["data_offsets"][1] - entry["data_offsets"][0]
  return dict(totals)


# --- accounting ---------------------------------------------------------------------------------------------


def test_a_missing_tensor(directory):
  edit(directory, lambda found: found.pop(LAYER + "self_attn.o_proj.weight"))
  assert refusal(directory) == (f"{directory}: does not fit k3: 1 missing: {LAYER}self_attn.o_proj.weight")


def test_a_missing_expert(directory):
  stem = LAYER + "block_sparse_moe.experts.2.w2.weight_"
  edit(directory, lambda found: [found.pop(stem + part) for part in ("packed", "scale")])
  assert refusal(directory) == f"{directory}: does not fit k3: 2 missing: {stem}packed, {stem}scale"


def test_an_expert_renamed_as_if_it_were_plain(directory):
  stem = LAYER + "block_sparse_moe.experts.0.w1.weight"
  edit(directory, lambda found: found.update({stem: found.pop(stem + "_packed")}))
  message = refusal(directory)
  assert f"1 unknown: {stem}_scale" in message
  assert f"1 of another form: {stem} (expected [96, 32], got [96, 16])" in message


def test_an_extra_tensor_with_a_near_miss(directory):
  name = LAYER + "self_attn.o_proj.weight"
  wrong = LAYER + "self_attn.out_proj.weight"
  edit(directory, lambda found: found.update({wrong: found.pop(name)}))
  assert refusal(directory) == (
    f"{directory}: does not fit k3: 1 missing: {name}, did you mean '{wrong}'?; "
    f"1 unknown: {wrong}, did you mean '{name}'?"
  )


def test_many_missing_tensors_are_counted(directory):
  edit(directory, lambda found: [found.pop(name) for name in list(found) if name.startswith(LAYER)])
  message = refusal(directory)
  assert " and " in message and message.endswith("more") and message.count(LAYER) == 5


def test_another_depth(directory):
  cfg = config_of(directory, base_num_decoder_layers=9)
  assert "missing: language_model.model.layers.6.input_layernorm.weight" in refusal(directory, cfg)


def test_another_vocabulary(directory):
  edit_config(directory, vocab_size=128)
  assert "language_model.model.embed_tokens.weight (expected [128, 64], got [96, 64])" in refusal(directory)


def test_codes_where_numbers_belong(directory):
  name = LAYER + "input_layernorm.weight"
  edit(directory, lambda found: found.update({name: np.zeros(64, np.uint8)}))
  assert f"1 of another form: {name} (expected BF16, got U8)" in refusal(directory)


@pytest.mark.parametrize("name, shape", [("q_conv1d.weight", (4, 48)), ("dt_bias", (3, 16)), ("A_log", (2,))])
def test_shapes_that_only_look_alike_are_refused(directory, name, shape):
  name = f"language_model.model.layers.0.self_attn.{name}"
  edit(directory, lambda found: found.update({name: np.zeros(shape, np.float32)}))
  assert f"got {list(shape)})" in refusal(directory)


def test_a_strange_prefix_binds_nothing(directory):
  edit(directory, lambda found: [found.update({f"net.{name}": found.pop(name)}) for name in list(found)])
  message = refusal(directory)
  assert "no decoder tensors: expected language_model.model.embed_tokens.weight or model.embed" in message
  assert "got net.language_model" in message


@pytest.mark.parametrize("expert_weights", ["packed", "dequantized"])
def test_a_nan_scale(directory, expert_weights):
  name = LAYER + "block_sparse_moe.experts.3.w3.weight_scale"
  edit(directory, lambda found: found[name].__setitem__((5, 0), 255))
  cfg = config_of(directory, expert_weights=expert_weights)
  assert refusal(directory, cfg) == f"{name}: scale byte 255 (NaN) at [5, 0]"


def test_a_directory_without_weights(tmp_path):
  cfg = config_of(write_k3(tmp_path / "k3"))
  (tmp_path / "empty").mkdir()
  assert refusal(tmp_path / "empty", cfg).startswith(f"{tmp_path}/empty: no whole checkpoint: expected")
  assert refusal(tmp_path / "absent", cfg) == f"{tmp_path}/absent: no such checkpoint directory"


# --- A_log --------------------------------------------------------------------------------------------------


def test_padding_of_the_published_width_has_to_be_zero(directory):
  edit(directory, lambda found: found[A_LOG].__setitem__(100, 1.0))
  assert refusal(directory) == (
    f"{directory}: {A_LOG}: 3 heads stand in [128], but 1 of the 125 values behind them are not zero"
  )
  kept = load(directory, config_of(directory), a_log_padding="any").manifest.a_log_tails
  assert list(kept) == [A_LOG]


def test_another_width_keeps_its_tail_with_a_warning(caplog):
  directory = oracle()
  loaded = load(directory, config_of(directory))
  assert len(loaded.manifest.a_log_tails) == 2
  assert "A_log is not zero behind its heads in 2 layers" in caplog.text
  with pytest.raises(CheckpointError, match=r"2 heads stand in \[16\], but 14 of the 14 values"):
    load(directory, config_of(directory), a_log_padding="zeros")


def test_only_the_live_heads_are_read(directory):
  values = ParameterTree(load_params(directory, config_of(directory), progress=False)).values
  stored = tensors(directory)[A_LOG]
  assert stored.shape == (128,) and not stored[3:].any()
  np.testing.assert_array_equal(values["layers.0.self_attn.A_log"], stored[:3])


def test_the_released_rank_of_kimi_linear_is_read(tmp_path):
  directory = write_kimi_linear(tmp_path / "kl")
  name = "model.layers.0.self_attn.A_log"
  assert tensors(directory)[name].shape == (1, 1, 3, 1)
  values = ParameterTree(load_params(directory, config_of(directory))).values
  np.testing.assert_array_equal(values["layers.0.self_attn.A_log"], tensors(directory)[name].reshape(3))


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_report_accounts_for_every_byte(k3_directory, dtype):
  loaded = load(k3_directory, config_of(k3_directory, f"dtype={dtype}"))
  report, held = loaded.report, Counter()
  for array in ParameterTree(loaded.model).values.values():
    held[str(array.dtype)] += array.nbytes
  assert report.bytes_by_dtype == header_totals(k3_directory)
  assert report.held_by_dtype == dict(held) and set(held) == {dtype, "float32", "uint8"}
  assert report.tensors + len(report.skipped) == len(tensors(k3_directory))
  assert f"{report.tensors} tensors (BF16 " in str(report) and "vision tensors skipped" in str(report)


def test_float32_islands_stay_float32(k3_directory):
  values = ParameterTree(load_params(k3_directory, config_of(k3_directory, "dtype=bfloat16"))).values
  islands = ("A_log", "dt_bias", "conv1d.weight", "o_norm.scale", "e_score_correction_bias")
  found = {path: array.dtype for path, array in values.items() if path.endswith(islands)}
  assert len(found) >= 5 * 3 and set(found.values()) == {np.dtype("float32")}


def test_parameters_are_the_stored_numbers(k3_directory):
  stored = {name.removeprefix("language_model."): t for name, t in tensors(k3_directory).items()}
  loaded = load_params(k3_directory, config_of(k3_directory, "scan_layers=true"))
  values = {path: np.asarray(array) for path, array in ParameterTree(loaded).values.items()}
  cfg, plan = loaded.cfg, loaded.plan
  same = np.testing.assert_array_equal
  same(values["embed_tokens.embedding"], stored["model.embed_tokens.weight"].astype(np.float32))
  same(values["output_attn_res.proj"], stored["model.output_attn_res_proj.weight"][0].astype(np.float32))
  assert plan.repeats >= 2
  for layer in range(cfg.base_num_decoder_layers):
    part, index, row = plan.location(layer)
    ours = {
      path.removeprefix(f"{part}.{index}."): array if row is None else array[row]
      for path, array in values.items()
      if path.startswith(f"{part}.{index}.")
    }
    theirs = f"model.layers.{layer}."
    same(ours["input_layernorm.scale"], stored[theirs + "input_layernorm.weight"].astype(np.float32))
    if cfg.layer_kind(layer) == "kda":
      for branch, letter in enumerate("qkv"):
        taps = stored[f"{theirs}self_attn.{letter}_conv1d.weight"][:, 0]
        same(ours["self_attn.qkv_conv1d.weight"][branch], taps)
    if cfg.mlp_kind(layer) == "moe":
      for expert in range(cfg.num_experts):
        name = f"{theirs}block_sparse_moe.experts.{expert}.w2.weight_packed"
        same(ours["block_sparse_moe.experts.w2_packed"][expert], stored[name])


# --- shardings ----------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch):
  """Collects the file indexes that loads open, with their read counts."""
  found = []

  def spy(directory):
    found.append(reader.open_published(directory))
    return found[-1]

  monkeypatch.setattr(published, "open_published", spy)
  return found


def test_each_tensor_is_read_once(k3_directory, opened):
  load(k3_directory, config_of(k3_directory))
  files = opened[0]
  twice = {name for name, count in files.reads.items() if count > 1}
  assert set(files.reads) == set(files.entries)
  # the padding is checked before anything is allocated; kv_b_proj fills two parameters
  assert all(name.endswith(("A_log", "kv_b_proj.weight")) for name in twice)
  assert all(files.reads[name] == 2 for name in twice)


@pytest.mark.parametrize("overrides", [("scan_layers=true",), ("expert_weights=dequantized",)])
def test_a_sharded_load_is_the_same_numbers(k3_directory, overrides):
  cfg = config_of(k3_directory, *overrides)
  whole = load_params(k3_directory, cfg)
  mesh = jax.make_mesh((2, 4), ("x", "y"))
  state = nnx.state(registry.abstract(cfg))
  sharded = load_params(
    k3_directory, cfg, mesh_shardings=jax.tree.map(lambda s: spread(mesh, s.shape), state)
  )
  assert_same_models(sharded, whole)
  devices = {len(array.sharding.device_set) for array in ParameterTree(sharded).values.values()}
  assert devices == {8}


def spread(mesh, shape):
  """Splits the last axis over y and the first over x where they divide; the rest is replicated."""
  axes = [None] * len(shape)
  if shape[-1] % 4 == 0:
    axes[-1] = "y"
  if len(shape) > 1 and shape[0] % 2 == 0:
    axes[0] = "x"
  return NamedSharding(mesh, PartitionSpec(*axes))


def test_only_the_experts_of_local_devices_are_read(k3_directory):
  files, cfg = reader.open_published(k3_directory), config_of(k3_directory)
  _, specs = published.match(files, cfg)
  sources = published._sources(ParameterTree(registry.abstract(cfg)), specs)
  path = "layers.1.block_sparse_moe.experts.w1_packed"
  fill = published._Filler(files, cfg, sources[path], np.dtype(np.uint8))
  part = fill((slice(0, 2), slice(8, 16), slice(0, 16)))  # what the first of two hosts may hold
  assert sorted(files.reads) == [f"{LAYER}block_sparse_moe.experts.{e}.w1.weight_packed" for e in (0, 1)]
  np.testing.assert_array_equal(part[1], tensors(k3_directory)[sorted(files.reads)[1]][8:16])


def test_replicas_are_filled_once(k3_directory, opened):
  cfg = config_of(k3_directory)
  everywhere = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec())
  load(k3_directory, cfg, mesh_shardings={"embed_tokens.embedding": everywhere})
  assert opened[0].reads["language_model.model.embed_tokens.weight"] == 1


# --- memory -------------------------------------------------------------------------------------------------

PEAK = """
import json, sys
from MaxText.checkpoints.load import load
from MaxText.configs.loader import load as load_config
from MaxText.models import registry
import jax.numpy as jnp

def status(key):
  return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))

directory, *overrides = sys.argv[1:]
cfg = load_config(directory, overrides)
jnp.zeros(1).block_until_ready()
registry.abstract(cfg)
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts here
before = status("VmRSS")
report = load(directory, cfg).report
print(json.dumps([status("VmHWM") - before, sum(report.held_by_dtype.values())]))
"""


def peak_of(directory, *overrides):
  command = [sys.executable, "-c", PEAK, str(directory), *overrides]
  run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
  return json.loads(run.stdout)


def write_large(directory, **sizes):
  config = k3_config_json(
    num_hidden_layers=5,
    full_attn_layers=(2, 5),
    kda_heads=4,
    kda_head_dim=64,
    hidden_size=512,
    routed_expert_hidden_size=256,
    moe_intermediate_size=256,
    vocab_size=4096,
    **sizes,
  )
  return write_checkpoint(directory, config, 1, shards=4, packed=False)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure a peak")
def test_the_peak_of_a_load_is_bounded(tmp_path):
  directory = write_large(tmp_path / "large", num_experts=32)
  shard = max(file.stat().st_size for file in directory.glob("*.safetensors"))
  peak, kept = peak_of(directory, "dtype=bfloat16")
  assert kept > 60e6
  assert peak < 1.3 * kept + shard


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure a peak")
@pytest.mark.parametrize("overrides", [("dtype=bfloat16",), ("scan_layers=true",)])
def test_the_peak_of_a_large_load_is_bounded(tmp_path, overrides):
  directory = write_large(tmp_path / "large", num_experts=192)
  peak, kept = peak_of(directory, *overrides)
  assert kept > 300e6
  assert peak < 1.3 * kept


def test_the_progress_bar_stays_off_when_nobody_watches(k3_directory, capfd):
  load_published(k3_directory, config_of(k3_directory), progress=True)
  assert "loading" not in capfd.readouterr().err
