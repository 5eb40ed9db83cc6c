"""Every contact with maxtext's internals: what we rely on, what we put in its place, and for how long.

maxtext has no plugin interface, so a run replaces a few of its module attributes and puts them back after it.
`CONTRACTS` lists each function that is called or replaced, with the parameters that it must have; another
release of maxtext is refused in one line before anything is touched.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import ValidationError, create_model

from MaxText.common.errors import CheckpointError, ConfigError, UserError
from MaxText.configs.schema import Config

VERSION = "0.2.5"
INSTALL = 'pip install "maxtext-kimi-k3[train]"'

# "module:attribute" of maxtext -> names of its parameters, in order; None for what is no function
CONTRACTS: dict[str, tuple[str, ...] | None] = {
  "configs.types:MaxTextConfig": None,
  "configs.pyconfig:HyperParameters": ("pydantic_config",),
  "configs.pyconfig:_initialize_pydantic": ("argv", "config_class", "kwargs"),
  "utils.model_creation_utils:create_model": ("config", "mesh", "model_mode", "rngs", "quant_mode_str"),
  "utils.muon_utils:transform_logic": ("path", "shape", "include_routers"),
  "utils.maxtext_utils:apply_gradient_clipping": ("raw_grads", "state", "clipping_threshold"),
  "utils.maxtext_utils:calculate_tflops_training_per_device": ("config", "log"),
  "utils.exceptions:StopTraining": None,
  "common.metric_logger:MetricLogger": ("config", "learning_rate_schedule", "start_step"),
  "common.metric_logger:MetricLogger.write_metrics": ("self", "metrics", "step", "metric_type"),
  "input_pipeline.input_pipeline_interface:create_data_iterator": ("config", "mesh"),
  "input_pipeline.multihost_dataloading:MultiHostDataLoadIterator": (
    *("dataloader", "global_mesh", "generate_padding_batch", "expansion_loading_factor_for_grain"),
  ),
  "common.checkpointing:load_state_if_possible": (
    *("checkpoint_manager", "data_iterator", "load_parameters_from_path", "load_full_state_from_path"),
    *("checkpoint_storage_concurrent_gb", "abstract_unboxed_pre_state"),
    *("enable_single_replica_ckpt_restoring", "dataset_type", "step", "use_ocdbt", "use_zarr3"),
    *("enable_orbax_v1", "checkpoint_conversion_fn", "source_checkpoint_layout"),
    *("expansion_factor_real_data", "maxtext_config"),
  ),
  "common.checkpointing:maybe_save_checkpoint": (
    *("checkpoint_manager", "state", "config", "data_iterator", "step"),
  ),
  "trainers.pre_train.train:train_step": (
    *("model", "config", "state_mesh_shardings", "params_shardings", "state", "data", "dropout_rng"),
  ),
  "trainers.pre_train.train:training_loop_iteration": ("jax_device_state", "python_vars", "immutable_data"),
  "trainers.pre_train.train:run": ("config", "recorder"),
  "utils.train_utils:validate_train_config": ("config",),
}

# groups of maxtext's configuration whose keys mean for our decoder what they mean for its own
PASSED_GROUPS = (
  *("Checkpointing", "OrbaxStorage", "HardwareAndMesh", "LayoutAndSharding", "DcnParallelism"),
  *("IciParallelism", "TrainingLoop", "Optimizer", "AdamW", "Muon", "Profiling", "HloDump", "Metrics"),
  *("Tensorboard", "Goodput", "DataTypes"),
)


def check_version() -> None:
  """Checks that maxtext is there in the release that this file was written for; imports nothing of it.

  Raises:
    ConfigError: it is absent or another release; the message says what to install.
  """
  try:
    found = importlib.metadata.version("maxtext")
  except importlib.metadata.PackageNotFoundError:
    raise ConfigError(f"training needs maxtext {VERSION}, which is not installed: {INSTALL}") from None
  if found != VERSION:
    raise ConfigError(f"training needs maxtext {VERSION}, this is {found}: {INSTALL}")


def require() -> None:
  """Checks the version and every contract.

  Raises:
    ConfigError: as `check_version`, or the installed package is not the one that was released.
  """
  check_version()
  if broken := list(broken_contracts()):
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    raise ConfigError(f"training needs maxtext {VERSION} as released, but {broken[0]}{more}: {INSTALL}")


def broken_contracts() -> Iterator[str]:
  """Yields what of `CONTRACTS` the installed maxtext does not keep."""
  for name, wanted in CONTRACTS.items():
    module, _, attribute = name.partition(":")
    try:
      found = functools.reduce(
        lambda owner, name: getattr(owner, name, None), attribute.split("."), _module(module)
      )
    except ImportError as error:
      yield f"maxtext.{module} cannot be imported ({error})"
      continue
    if found is None:
      yield f"maxtext.{module} has no {attribute}"
    elif wanted is not None and (parameters := tuple(inspect.signature(found).parameters)) != wanted:
      yield f"maxtext.{module}.{attribute} takes {', '.join(parameters)}"
  groups = _module("configs.types")
  yield from (f"maxtext.configs.types has no {name}" for name in PASSED_GROUPS if not hasattr(groups, name))


def _module(name: str) -> Any:
  """Imports `maxtext.name` without what it prints and logs while it looks for cloud packages."""
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  with contextlib.redirect_stdout(io.StringIO()):
    return importlib.import_module(f"maxtext.{name}")


# --- configuration ------------------------------------------------------------------------------------------


def passed_keys() -> dict[str, Any]:
  """Returns key -> field of maxtext's configuration that a command line may pass on."""
  types = _module("configs.types")
  fields: dict[str, Any] = {}
  for group in PASSED_GROUPS:
    fields |= getattr(types, group).model_fields
  return {key: field for key, field in fields.items() if key not in Config.model_fields}


def all_keys() -> set[str]:
  """Every key of maxtext's configuration."""
  return set(_module("configs.types").MaxTextConfig.model_fields)


def build_config(cfg: Config, keys: Mapping[str, Any]) -> Any:
  """Returns maxtext's configuration object, extended by our keys.

  Args:
    cfg: our model; keys that maxtext lacks become fields of the object, so that its logs hold them too.
    keys: maxtext's own keys that differ from its base.yml.

  Raises:
    ConfigError: maxtext refuses a value or a combination.
  """
  types, pyconfig = _module("configs.types"), _module("configs.pyconfig")
  theirs = types.MaxTextConfig.model_fields
  ours = {key: value for key, value in cfg.model_dump().items() if key not in theirs}
  fields: dict[str, Any] = {key: (Any, None) for key in ours}
  extended = create_model("KimiMaxTextConfig", __base__=types.MaxTextConfig, model_name=(str, ...), **fields)
  base = str(Path(_module("configs").__file__).parent / "base.yml")
  try:
    with _quiet():
      checked = pyconfig._initialize_pydantic(["", base], config_class=extended, **{**ours, **keys})
      return pyconfig.HyperParameters(checked)
  except ValidationError as failure:
    error = failure.errors()[0]
    if not error["loc"]:  # a combination, of which `input` would be the whole configuration
      raise ConfigError(f"maxtext refuses the configuration: {error['msg']}") from None
    key = ".".join(map(str, error["loc"]))
    raise ConfigError(f"{key}: got {error['input']!r}: {error['msg']}") from None
  except (ValueError, TypeError, KeyError, AssertionError) as error:
    raise ConfigError(f"maxtext refuses the configuration: {str(error).partition(chr(10))[0]}") from None


# --- the run ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parts:
  """What takes the place of maxtext's own parts in one run.

  Attributes:
    model: (mesh, rngs) -> module with the call of `training.model.TrainedDecoder`.
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

  model: Callable[[jax.sharding.Mesh, nnx.Rngs], nnx.Module]
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


def run(config: Any, parts: Parts) -> None:
  """Runs maxtext's own training loop with `parts` in place of its model, data and step.

  Raises:
    UserError: a checkpoint cannot be saved or does not fit, or the data are at fault.
  """
  train, train_utils = _module("trainers.pre_train.train"), _module("utils.train_utils")
  with _replaced(config, parts), _quiet():
    try:
      train_utils.validate_train_config(config)
      jax.config.update("jax_use_shardy_partitioner", config.shardy)
      train.run(config, None)
    except UserError:
      raise
    except Exception as error:
      known = _as_user_error(error, config)
      if known is None:
        raise
      raise known from error


def _as_user_error(error: Exception, config: Any) -> UserError | None:
  """The one line for a failure that a user can mend, None for any other."""
  causes, cause = [error], error
  while (cause := cause.__cause__ or cause.__context__) is not None:
    causes.append(cause)
  if users := [cause for cause in causes if isinstance(cause, UserError)]:
    return users[-1]
  text = str(error)
  first = text.partition("\n")[0]
  system = next((cause for cause in causes if isinstance(cause, OSError)), None)
  if text.startswith("Checkpointing failed") or (system is not None and system.errno is not None):
    return CheckpointError(f"{config.checkpoint_dir}: a checkpoint cannot be saved: {system or first}")
  if text.startswith("Checkpoint does not match the model"):
    return CheckpointError(f"{config.checkpoint_dir}: {' '.join(text.split())}")
  if text.startswith("Unsharded parameter percentage"):
    names = [
      line.split()[2].partition(".value")[0] for line in text.splitlines() if line.startswith(" - Name:")
    ]
    return ConfigError(f"sharding_tolerance: {first.rstrip('.')}, beginning with {' '.join(names[:1])}")
  if text.startswith("Requested training up to step"):
    return ConfigError(f"steps: {first}")
  return None


@contextlib.contextmanager
def _replaced(config: Any, parts: Parts) -> Iterator[None]:
  """Puts our parts into maxtext's modules for the length of one run."""
  replacements = {
    ("utils.model_creation_utils", "create_model"): _create_model(parts),
    ("utils.muon_utils", "transform_logic"): parts.muon,
    ("utils.maxtext_utils", "calculate_tflops_training_per_device"): _tflops(parts),
    ("input_pipeline.input_pipeline_interface", "create_data_iterator"): _data(parts),
    ("common.checkpointing", "load_state_if_possible"): _load(parts),
    ("common.metric_logger", "MetricLogger"): _logger(parts),
    ("trainers.pre_train.train", "train_step"): _step(parts),
    ("trainers.pre_train.train", "training_loop_iteration"): _iteration(parts),
  }
  saved = {place: getattr(_module(place[0]), place[1]) for place in replacements}
  try:
    for (module, name), value in replacements.items():
      setattr(_module(module), name, value)
    yield
  finally:
    for (module, name), value in saved.items():
      setattr(_module(module), name, value)


def _create_model(parts: Parts) -> Callable:
  def create_model(config, mesh, model_mode="train", rngs=None, *, quant_mode_str="train"):
    return parts.model(mesh, rngs)

  return create_model


def _tflops(parts: Parts) -> Callable:
  # maxtext's formula is that of another architecture
  return lambda config, log=True: (parts.tflops, parts.tflops, 0.0)


def _data(parts: Parts) -> Callable:
  loading = _module("input_pipeline.multihost_dataloading")
  interface = _module("input_pipeline.input_pipeline_interface")
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
  original = _module("common.checkpointing").load_state_if_possible

  def load_state_if_possible(checkpoint_manager, data_iterator, *args, **kwargs):
    restored, weights = original(checkpoint_manager, data_iterator, *args, **kwargs)
    if restored is None and weights is None:
      weights = parts.initial_weights(args[3])
    return restored, weights

  return load_state_if_possible


def _logger(parts: Parts) -> type:
  """maxtext's logger, whose own file of measurements is emptied by every evaluation."""
  original = _module("common.metric_logger").MetricLogger

  class MetricLogger(original):
    def write_metrics(self, metrics, step, metric_type="train"):
      super().write_metrics(metrics, step, metric_type)
      if metric_type in ("train", "eval"):
        parts.on_metrics(step, metric_type, metrics["scalar"])

  return MetricLogger


def _step(parts: Parts) -> Callable:
  """maxtext's step, then ours; a step without a finite loss and gradient leaves the state as it was."""
  train, utils = _module("trainers.pre_train.train"), _module("utils.maxtext_utils")
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


def _iteration(parts: Parts) -> Callable:
  """maxtext's iteration, and our look at the step before, whose metrics are there without waiting."""
  train, stop = _module("trainers.pre_train.train"), _module("utils.exceptions").StopTraining
  saving = _module("common.checkpointing")
  original, waiting = train.training_loop_iteration, []

  def settle(jax_device_state):
    step, metrics = waiting.pop(0)
    if not bool(metrics["finite"]):
      parts.on_stop(step, jax_device_state["state"], metrics)
    parts.on_step(step, metrics["scalar"])

  def training_loop_iteration(jax_device_state, python_vars, immutable_data):
    step = python_vars["step"]
    try:
      metrics = original(jax_device_state, python_vars, immutable_data)
    except stop as ended:
      if not isinstance(ended.__context__, StopIteration):
        raise RuntimeError("the data could not be read") from ended.__context__ or ended
      while waiting:
        settle(jax_device_state)
      state, config = jax_device_state["state"], immutable_data["config"]
      saving.maybe_save_checkpoint(
        python_vars["checkpoint_manager"], state, config, python_vars["data_iterator"]
      )
      parts.on_end(step)
      raise
    waiting.append((step, metrics))
    while len(waiting) > (step + 1 < immutable_data["steps"]):
      settle(jax_device_state)
    return metrics

  return training_loop_iteration


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps maxtext's prints from our stdout, and its notes of no consequence from the log."""
  loggers = [logging.getLogger(name) for name in ("absl", "maxtext")]
  levels = [logger.level for logger in loggers]
  try:
    for logger in loggers:
      logger.setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    for logger, level in zip(loggers, levels):
      logger.setLevel(level)
