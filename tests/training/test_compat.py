"""What we rely on in maxtext is there, and another release is refused in one clear line."""

import importlib.metadata
import re
import types
from functools import partial

import pytest

from MaxText.common.errors import ConfigError, InputError, TrainingError
from MaxText.configs import loader
from MaxText.configs.options import TrainOptions
from MaxText.configs.schema import Config

pytest.importorskip("grain", reason="the packages of training are not installed; pip install '.[train]'")

from MaxText.training import compat, parts, run  # noqa: E402
from MaxText.training.keys import maxtext_keys  # noqa: E402
from MaxText.training.maxtext_modules import maxtext_module  # noqa: E402


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
  cfg, options = loader.load_command("kimi-k3-tiny", [], TrainOptions)
  cfg = run.trained_config(cfg)
  mesh = loader.load_training_mesh(options)
  return cfg, maxtext_keys(cfg, options, mesh, {}, tmp_path_factory.mktemp("run"))


@pytest.mark.train
def test_the_installed_maxtext_keeps_every_contract():
  assert list(compat.broken_contracts()) == []
  compat.require()


def test_another_release_is_refused_before_it_is_imported(monkeypatch):
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.6")
  monkeypatch.setattr(compat, "maxtext_module", pytest.fail)
  with pytest.raises(ConfigError) as caught:
    compat.require()
  assert str(caught.value) == (
    'training needs maxtext 0.2.5, this is 0.2.6: pip install "maxtext-kimi-k3[train]"'
  )


def test_an_absent_maxtext_names_what_to_install(monkeypatch):
  def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", absent)
  with pytest.raises(ConfigError, match=r"not installed: pip install \"maxtext-kimi-k3\[train\]\""):
    compat.require()


@pytest.mark.train
@pytest.mark.parametrize(
  "contract, message",
  [
    ({"trainers.pre_train.train:train_step": ("model", "config")}, "train.train_step takes model, config, "),
    ({"trainers.pre_train.train:train_steps": ()}, "maxtext.trainers.pre_train.train has no train_steps"),
    ({"trainers.other:run": ()}, "maxtext.trainers.other cannot be imported"),
  ],
)
def test_a_changed_maxtext_is_named(monkeypatch, contract, message):
  monkeypatch.setattr(compat, "CONTRACTS", contract)
  with pytest.raises(ConfigError, match=message):
    compat.require()


@pytest.mark.train
def test_the_configuration_holds_maxtexts_keys_and_ours(keys):
  cfg, theirs = keys
  config = compat.build_config(cfg, theirs)
  assert config.attn_res_block_size == 3 and config.gate_lower_bound == -5.0  # ours
  assert config.adam_b1 == 0.9 and config.mesh_axes  # maxtext's own
  assert config.vocab_size == cfg.vocab_size and config.scan_layers is True
  assert not config.routed_bias  # the balancing of maxtext knows its own layers only


@pytest.mark.train
def test_a_wrong_value_of_maxtexts_own_key_is_one_line(keys):
  cfg, theirs = keys
  with pytest.raises(ConfigError, match="^adam_b1: got 'high': .*number") as caught:
    compat.build_config(cfg, theirs | {"adam_b1": "high"})
  assert "\n" not in str(caught.value)
  with pytest.raises(ConfigError, match="^maxtext refuses the configuration: .*not_a_key"):
    compat.build_config(cfg, theirs | {"not_a_key": 1})


@pytest.mark.train
def test_keys_are_passed_on_by_groups_and_ours_come_first():
  passed = compat.passed_keys()
  assert {"adam_b1", "muon_beta", "lr_schedule_type", "dcn_data_parallelism", "profiler"} <= passed.keys()
  stated_by_a_mesh = {
    "logical_axis_rules",
    "mesh_axes",
    "ici_context_parallelism",
    "dcn_sequence_parallelism",
  }
  assert not passed.keys() & stated_by_a_mesh
  assert not passed.keys() & Config.model_fields.keys()
  assert {"attention", "sparse_matmul", "quantization", "rope_type"} <= compat.all_keys() - passed.keys()


@pytest.mark.train
def test_what_a_run_replaces_comes_back(keys):
  nothing = parts.Parts(*[None] * len(parts.Parts.__dataclass_fields__))
  places = [name.partition(":")[::2] for name in compat.CONTRACTS if "." not in name.partition(":")[2]]
  before = [getattr(maxtext_module(module), name) for module, name in places]
  with pytest.raises(ZeroDivisionError):
    with parts.replaced(compat.build_config(*keys), nothing):
      changed = [getattr(maxtext_module(module), name) for module, name in places]
      raise ZeroDivisionError
  assert sum(a is not b for a, b in zip(before, changed)) == 12
  assert all(a is getattr(maxtext_module(m), n) for a, (m, n) in zip(before, places))


def raised_from(text, cause):
  error = RuntimeError(text)
  error.__cause__ = cause
  return error


saving = partial(raised_from, "Checkpointing failed. wrapped")
reading = partial(raised_from, "the data could not be read")


@pytest.mark.parametrize(
  "failure, message",
  [
    (
      saving(OSError(28, "No space left on device")),
      r"^RUN: a checkpoint cannot be saved: \[Errno 28\] No space left on device$",
    ),
    (OSError(24, "Too many open files", "a.jsonl"), r"^\[Errno 24\] Too many open files: 'a.jsonl'$"),
    (reading(OSError(5, "Input/output error")), r"^\[Errno 5\] Input/output error$"),
    (reading(InputError("grain_train_files: a.jsonl: gone")), "^grain_train_files: a.jsonl: gone$"),
    (saving(TrainingError("step 3: the loss is nan")), "^step 3: the loss is nan$"),
    (
      RuntimeError("Checkpointing failed. the bucket is gone"),
      "RUN: a checkpoint cannot be saved: Checkpointing",
    ),
    (
      saving(ValueError("OUT_OF_RANGE: Failed to write 7 bytes to file 31: [os_error_code='28']")),
      r"RUN: a checkpoint cannot be saved: \[Errno 28\] No space left on device$",
    ),
    (RuntimeError("Checkpoint does not match the model:\n  - 'a': missing"), "RUN: .* 'a': missing$"),
    (
      AssertionError("Unsharded parameter percentage (9%)\nlarge:\n - Name: w1 (4)"),
      r"sharding_.* \(9%\), .* w1$",
    ),
    (RuntimeError("Requested training up to step 5, but more"), "^steps: Requested training up to step 5"),
  ],
)
def test_a_failure_that_a_user_can_mend_is_one_line(failure, message):
  line = str(compat._as_user_error(failure, types.SimpleNamespace(checkpoint_dir="RUN")))
  assert re.search(message, line) and "\n" not in line


def test_a_defect_keeps_its_traceback():
  config = types.SimpleNamespace(checkpoint_dir="RUN")
  assert compat._as_user_error(TypeError("unhashable"), config) is None
  assert compat._as_user_error(FileNotFoundError("no errno"), config) is None
