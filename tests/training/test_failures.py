"""What goes wrong while a run goes on: a bad loss before a save, late writes, files that are gone."""

import contextlib
import gc
import json
import logging
import sys
import types

import jax.numpy as jnp
import pytest
from flax import nnx

pytest.importorskip("grain", reason="the packages of training are not installed; pip install '.[train]'")

from MaxText.common.errors import InputError  # noqa: E402
from MaxText.configs import loader  # noqa: E402
from MaxText.models import registry  # noqa: E402
from MaxText.training import parts  # noqa: E402
from MaxText.training.documents import find_documents  # noqa: E402
from MaxText.training.maxtext_modules import maxtext_module, one_complaint  # noqa: E402

# --- steps and saves ----------------------------------------------------------------------------------------


class Stopped(Exception):
  """What `on_stop` raises here."""


class Manager:
  """A checkpoint manager that notes what becomes of it."""

  def __init__(self):
    self.saved, self.closed = [], False

  def close(self):
    self.closed = True
    raise OSError("the other writes fail too")


@pytest.fixture
def loop(monkeypatch):
  """Runs `steps` steps of which some are bad, saving each `period`; returns manager and steps looked at."""
  saving = maxtext_module("common.checkpointing")

  def save(manager, step, state, config, data_iterator, force):
    manager.saved.append(step)

  monkeypatch.setattr(saving, "save_checkpoint", save)

  def iteration(device, python, immutable):
    device["state"], metrics = device["p_train_step"](device["state"], None)
    if python["step"] and python["step"] % immutable["period"] == 0:
      saving.save_checkpoint(python["checkpoint_manager"], python["step"], device["state"], None, None, False)
    return metrics

  monkeypatch.setattr(maxtext_module("trainers.pre_train.train"), "training_loop_iteration", iteration)

  def run(steps, bad, period):
    looked, manager = [], Manager()

    def on_stop(step, state, metrics):
      raise Stopped(step, state)

    given = types.SimpleNamespace(on_stop=on_stop, on_step=lambda step, scalars: looked.append(step))
    watched = parts._Loop(given)
    monkeypatch.setattr(saving, "save_checkpoint", watched.save)
    train_step = lambda state, batch: (state + 1, {"scalar": {}, "finite": jnp.array(state not in bad)})
    device = {"state": 0, "p_train_step": train_step}
    trace = []
    with contextlib.suppress(Stopped):
      for step in range(steps):
        python = {"step": step, "checkpoint_manager": manager}
        watched.iteration(device, python, {"steps": steps, "period": period})
        trace.append(list(looked))
    watched.close()
    return manager, trace, looked

  return run


@pytest.mark.train
@pytest.mark.parametrize("period, saved", [(1, [1, 2]), (2, [2]), (3, []), (4, [])])
def test_nothing_is_saved_behind_a_step_whose_loss_is_no_number(loop, period, saved):
  manager, _, looked = loop(8, {3}, period)
  assert manager.saved == saved and looked == [0, 1, 2]
  assert manager.closed  # a save that is under way becomes whole


@pytest.mark.train
def test_a_step_is_looked_at_one_step_late_but_before_a_save_and_at_the_end(loop):
  manager, trace, _ = loop(5, set(), 3)
  assert manager.saved == [3]
  assert trace == [[], [0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@pytest.mark.train
def test_a_save_that_fails_late_is_told_as_one_that_fails_at_once(monkeypatch):
  def failing(manager):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(maxtext_module("common.checkpointing"), "wait_until_finished", failing)
  with pytest.raises(RuntimeError, match="^Checkpointing failed. .*No space left") as caught:
    parts._Loop(None).wait(Manager())
  assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.train
@pytest.mark.parametrize("failure", [None, OSError("disk"), KeyboardInterrupt()])
def test_late_complaints_are_kept_back_within_a_run_only(failure):
  loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
  before = sys.unraisablehook, [list(logger.filters) for logger in loggers]
  with contextlib.suppress(OSError, KeyboardInterrupt), one_complaint():
    assert sys.unraisablehook is not before[0]
    if failure is not None:
      raise failure
  gc.collect()
  assert (sys.unraisablehook, [list(logger.filters) for logger in loggers]) == before


# --- evaluation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [None, 1.0])
def test_an_evaluation_has_no_capacity(factor):
  cfg = loader.load("kimi-k3-tiny", ["expert_weights=dequantized"])
  cfg = cfg.model_copy(update={"moe_dispatch": "ragged_all_to_all", "moe_capacity_factor": factor})
  trained = nnx.Module()
  trained.model = nnx.Module()
  trained.model.decoder = registry.abstract(cfg)
  graph, state = nnx.split(trained)
  without = parts._without_capacity(None, graph, state)
  if factor is None:
    assert without is None
    return
  kept = {module.cfg.moe_capacity_factor for module in configured(nnx.merge(graph, state))}
  assert kept == {1.0}
  evaluated = nnx.merge(without, state)
  assert {module.cfg.moe_capacity_factor for module in configured(evaluated)} == {None}


def configured(module):
  return [node for _, node in nnx.iter_graph(module) if hasattr(node, "cfg")]


# --- files --------------------------------------------------------------------------------------------------


def test_lines_that_are_gone_are_told_with_key_and_path(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps({"text": "word"}))
  documents = find_documents("grain_train_files", str(path), "text")
  path.unlink()
  with pytest.raises(InputError, match=f"^grain_train_files: {path}: unreadable .No such file or directory"):
    documents[0]


def test_a_row_group_that_is_torn_is_told_with_key_and_path(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  path = tmp_path / "a.parquet"
  parquet.write_table(pyarrow.table({"text": [f"word {n}" for n in range(2000)]}), path, row_group_size=500)
  documents = find_documents("grain_eval_files", str(path), "text")
  with path.open("r+b") as file:
    file.truncate(100)
  with pytest.raises(InputError, match=f"^grain_eval_files: {path}: row group 3: unreadable as parquet"):
    documents[1999]
