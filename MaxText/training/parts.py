"""What takes the place of maxtext's own parts in one run, and puts them back after it.

Only `compat.run` uses this file; what it relies on is listed in `compat.CONTRACTS`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.configs.schema import Config
from MaxText.training.maxtext_modules import maxtext_module


@dataclasses.dataclass(frozen=True)
class Parts:
  """What takes the place of maxtext's own parts in one run.

  Attributes:
    mesh: the devices, with maxtext's names of the axes.
    model: random numbers -> module with the call of `training.model.TrainedDecoder`, laid out on them.
    after_step: changes the model behind maxtext's own step, in place, and returns measurements; traced.
    train_data, eval_data: grain datasets of batches; None for maxtext's synthetic data, or for none.
    initial_weights: abstract state of the model -> its weights as nested dicts, or None to draw them.
    muon: (path, shape, include_routers) -> dimension numbers of a matrix, None for what Adam updates.
    tflops: training work of one device and step, 10^12 floating-point operations.
    on_step: called with (step, measurements) when a step's are there.
    on_metrics: called with (step, "train" or "eval", all measurements) for the record.
    on_stop: called with (step, state, metrics) at a step whose loss is no number; raises.
    on_end: called with the number of steps done when the data end before the steps do.
  """

  mesh: jax.sharding.Mesh
  model: Callable[[nnx.Rngs], nnx.Module]
  after_step: Callable[[Any], dict[str, jax.Array]]
  train_data: Any
  eval_data: Any
  initial_weights: Callable[[nnx.State], dict | None]
  muon: Callable[..., Any]
  tflops: float
  on_step: Callable[[int, dict[str, Any]], None]
  on_metrics: Callable[[int, str, dict[str, Any]], None]
  on_stop: Callable[[int, nnx.State, dict[str, Any]], None]
  on_end: Callable[[int], None]


@contextlib.contextmanager
def replaced(config: Any, parts: Parts) -> Iterator[None]:
  """Puts our parts into maxtext's modules for the length of one run."""
  loop = _Loop(parts)
  replacements = {
    ("utils.maxtext_utils", "get_mesh_from_config"): lambda config, devices=None: parts.mesh,
    ("utils.model_creation_utils", "create_model"): _create_model(parts),
    ("utils.muon_utils", "transform_logic"): parts.muon,
    ("utils.maxtext_utils", "calculate_tflops_training_per_device"): _tflops(parts),
    ("input_pipeline.input_pipeline_interface", "create_data_iterator"): _data(parts),
    ("common.checkpointing", "load_state_if_possible"): _load(parts),
    ("common.metric_logger", "MetricLogger"): _logger(parts),
    ("trainers.pre_train.train", "train_step"): _step(parts),
    ("trainers.pre_train.train", "build_eval_graphdef"): _without_capacity,
    ("trainers.pre_train.train", "training_loop_iteration"): loop.iteration,
    ("common.checkpointing", "save_checkpoint"): loop.save,
    ("common.checkpointing", "wait_until_finished"): loop.wait,
  }
  saved = {place: getattr(maxtext_module(place[0]), place[1]) for place in replacements}
  try:
    for (module, name), value in replacements.items():
      setattr(maxtext_module(module), name, value)
    yield
  except BaseException:
    loop.close()
    raise
  finally:
    for (module, name), value in saved.items():
      setattr(maxtext_module(module), name, value)


def _create_model(parts: Parts) -> Callable:
  def create_model(config, mesh, model_mode="train", rngs=None, *, quant_mode_str="train"):
    return parts.model(rngs)

  return create_model


def _tflops(parts: Parts) -> Callable:
  # maxtext's formula is that of another architecture
  return lambda config, log=True: (parts.tflops, parts.tflops, 0.0)


def _data(parts: Parts) -> Callable:
  loading = maxtext_module("input_pipeline.multihost_dataloading")
  interface = maxtext_module("input_pipeline.input_pipeline_interface")
  original = interface.create_data_iterator

  def create_data_iterator(config, mesh):
    if parts.train_data is None:
      return original(config, mesh)
    iterators = [
      loading.MultiHostDataLoadIterator(data, mesh) if data is not None else None
      for data in (parts.train_data, parts.eval_data)
    ]
    return tuple(iterators)

  return create_data_iterator


def _load(parts: Parts) -> Callable:
  original = maxtext_module("common.checkpointing").load_state_if_possible

  def load_state_if_possible(checkpoint_manager, data_iterator, *args, **kwargs):
    restored, weights = original(checkpoint_manager, data_iterator, *args, **kwargs)
    if restored is None and weights is None:
      weights = parts.initial_weights(args[3])
    return restored, weights

  return load_state_if_possible


def _logger(parts: Parts) -> type:
  """maxtext's logger, whose own file of measurements is emptied by every evaluation."""
  original = maxtext_module("common.metric_logger").MetricLogger

  class MetricLogger(original):
    def write_metrics(self, metrics, step, metric_type="train"):
      super().write_metrics(metrics, step, metric_type)
      if metric_type in ("train", "eval"):
        parts.on_metrics(step, metric_type, metrics["scalar"])

  return MetricLogger


def _step(parts: Parts) -> Callable:
  """maxtext's step, then ours; a step without a finite loss and gradient leaves the state as it was."""
  train, utils = maxtext_module("trainers.pre_train.train"), maxtext_module("utils.maxtext_utils")
  original, clip = train.train_step, utils.apply_gradient_clipping

  def train_step(model, config, state_shardings, params_shardings, state, data, dropout_rng=None):
    bad: dict[str, jax.Array] = {}
    before = jax.tree.leaves(state)  # the merged module shares the variables of `state` and changes them

    def watched(raw_grads, state, clipping_threshold):
      for path, grad in nnx.to_flat_state(raw_grads):
        bad[".".join(map(str, path))] = ~jnp.all(jnp.isfinite(grad[...]))
      return clip(raw_grads, state, clipping_threshold)

    utils.apply_gradient_clipping = watched
    try:
      new, metrics = original(model, config, state_shardings, params_shardings, state, data)
    finally:
      utils.apply_gradient_clipping = clip
    scalars = metrics["scalar"]
    finite = jnp.isfinite(scalars["learning/loss"])
    if "learning/raw_grad_norm" in scalars:
      finite &= jnp.isfinite(scalars["learning/raw_grad_norm"])
    merged = nnx.merge(model, new)
    scalars |= parts.after_step(merged.model)
    new = nnx.state(merged, nnx.Not(nnx.Intermediate))
    after, structure = jax.tree.flatten(new)
    kept = [jnp.where(finite, *pair) for pair in zip(after, before, strict=True)]
    return jax.tree.unflatten(structure, kept), metrics | {"finite": finite, "bad_gradients": bad}

  return train_step


def _without_capacity(config, model, state):
  """The model that evaluates where rows may be dropped in training: it drops none, as decoding does not."""
  whole = nnx.merge(model, state)
  if whole.model.decoder.cfg.moe_capacity_factor is None:
    return None
  for _, module in nnx.iter_graph(whole):
    if isinstance(cfg := getattr(module, "cfg", None), Config):
      module.cfg = cfg.model_copy(update={"moe_capacity_factor": None})
  return nnx.graphdef(whole)


class _Loop:
  """maxtext's iteration and saves, and our look at each step: one step late, when waiting costs no time.

  Before a save everything is looked at, so that no checkpoint stands behind a step that was undone.
  """

  def __init__(self, parts: Parts):
    self._parts, self._waiting, self._manager = parts, [], None
    self._stop = maxtext_module("utils.exceptions").StopTraining
    self._saving = maxtext_module("common.checkpointing")
    self._iteration = maxtext_module("trainers.pre_train.train").training_loop_iteration
    self._save, self._wait = self._saving.save_checkpoint, self._saving.wait_until_finished

  def _settle(self, state: nnx.State, late: int = 0) -> None:
    """Looks at all steps but the `late` last ones."""
    while len(self._waiting) > late:
      step, metrics = self._waiting.pop(0)
      if not bool(metrics["finite"]):
        self._parts.on_stop(step, state, metrics)
      self._parts.on_step(step, metrics["scalar"])

  def iteration(self, jax_device_state, python_vars, immutable_data):
    step, train_step = python_vars["step"], jax_device_state["p_train_step"]
    self._manager = python_vars["checkpoint_manager"]

    def noted(*inputs):
      state, metrics = train_step(*inputs)
      self._waiting.append((step, metrics))
      return state, metrics

    jax_device_state["p_train_step"] = noted
    try:
      metrics = self._iteration(jax_device_state, python_vars, immutable_data)
    except self._stop as ended:
      if not isinstance(ended.__context__, StopIteration):
        raise RuntimeError("the data could not be read") from ended.__context__ or ended
      state, config = jax_device_state["state"], immutable_data["config"]
      self._settle(state)
      self._saving.maybe_save_checkpoint(self._manager, state, config, python_vars["data_iterator"])
      if self._manager is not None:
        self.wait(self._manager)
      self._parts.on_end(step)
      raise
    finally:
      jax_device_state["p_train_step"] = train_step
    self._settle(jax_device_state["state"], late=step + 1 < immutable_data["steps"])
    return metrics

  def save(self, checkpoint_manager, step, state, config=None, data_iterator=None, force=False):
    self._settle(state)
    return self._save(checkpoint_manager, step, state, config, data_iterator, force)

  def wait(self, checkpoint_manager):
    try:
      self._wait(checkpoint_manager)
    except Exception as error:  # said as maxtext says it of a save that fails at once
      raise RuntimeError(f"Checkpointing failed. {error}") from error

  def close(self):
    """Ends the saves under way, after a failure: a good one becomes whole."""
    if self._manager is not None:
      with contextlib.suppress(Exception):
        self._manager.close()
