"""What we rely on in maxtext, its configuration and its devices, and a run of its loop with our parts.

maxtext has no plugin interface, so a run replaces a few of its module attributes (`parts.py`) and puts them
back after it. `CONTRACTS` lists each function that is called or replaced, with the parameters that it must
have; another release of maxtext is refused in one line before anything is touched.
"""

import functools
import importlib.metadata
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from pydantic import ValidationError, create_model

from MaxText.common.errors import CheckpointError, ConfigError, InputError, UserError
from MaxText.common.steps import whole_steps
from MaxText.configs.mesh import MESH_AXES
from MaxText.configs.schema import Config
from MaxText.training.maxtext_modules import causes, maxtext_module, one_complaint, quiet
from MaxText.training.parts import Parts, replaced

VERSION = "0.2.5"
INSTALL = 'pip install "maxtext-kimi-k3[train]"'

# "module:attribute" of maxtext -> names of its parameters, in order; None for what is no function
CONTRACTS: dict[str, tuple[str, ...] | None] = {
  "configs.types:MaxTextConfig": None,
  "configs.pyconfig:HyperParameters": ("pydantic_config",),
  "configs.pyconfig:_initialize_pydantic": ("argv", "config_class", "kwargs"),
  "utils.model_creation_utils:create_model": ("config", "mesh", "model_mode", "rngs", "quant_mode_str"),
  "utils.muon_utils:transform_logic": ("path", "shape", "include_routers"),
  "utils.maxtext_utils:get_mesh_from_config": ("config", "devices"),
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
  "common.checkpointing:save_checkpoint": (
    *("checkpoint_manager", "step", "state", "config", "data_iterator", "force"),
  ),
  "common.checkpointing:wait_until_finished": ("checkpoint_manager",),
  "trainers.pre_train.train:train_step": (
    *("model", "config", "state_mesh_shardings", "params_shardings", "state", "data", "dropout_rng"),
  ),
  "trainers.pre_train.train:build_eval_graphdef": ("config", "jit_model", "state"),
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
# keys of these groups that a mesh file states, and axes along which our decoder is not split
NOT_PASSED = re.compile(
  rf"^(ici|dcn)_(?!({'|'.join(MESH_AXES)})_parallelism$)\w+_parallelism$"
  r"|logical_axis_rules|mesh_axes$|data_sharding|custom_mesh|context_|ulysses_|internal_compile|shard_mode$"
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
        lambda owner, name: getattr(owner, name, None), attribute.split("."), maxtext_module(module)
      )
    except ImportError as error:
      yield f"maxtext.{module} cannot be imported ({error})"
      continue
    if found is None:
      yield f"maxtext.{module} has no {attribute}"
    elif wanted is not None and (parameters := tuple(inspect.signature(found).parameters)) != wanted:
      yield f"maxtext.{module}.{attribute} takes {', '.join(parameters)}"
  groups = maxtext_module("configs.types")
  yield from (f"maxtext.configs.types has no {name}" for name in PASSED_GROUPS if not hasattr(groups, name))


# --- configuration ------------------------------------------------------------------------------------------


def passed_keys() -> dict[str, Any]:
  """Returns key -> field of maxtext's configuration that a command line may pass on."""
  types = maxtext_module("configs.types")
  fields: dict[str, Any] = {}
  for group in PASSED_GROUPS:
    fields |= getattr(types, group).model_fields
  ours = Config.model_fields
  return {key: field for key, field in fields.items() if key not in ours and not NOT_PASSED.search(key)}


def all_keys() -> set[str]:
  """Every key of maxtext's configuration."""
  return set(maxtext_module("configs.types").MaxTextConfig.model_fields)


def build_config(cfg: Config, keys: Mapping[str, Any]) -> Any:
  """Returns maxtext's configuration object, extended by our keys.

  Args:
    cfg: our model; keys that maxtext lacks become fields of the object, so that its logs hold them too.
    keys: maxtext's own keys that differ from its base.yml.

  Raises:
    ConfigError: maxtext refuses a value or a combination.
  """
  types, pyconfig = maxtext_module("configs.types"), maxtext_module("configs.pyconfig")
  theirs = types.MaxTextConfig.model_fields
  ours = {key: value for key, value in cfg.model_dump().items() if key not in theirs}
  fields: dict[str, Any] = {key: (Any, None) for key in ours}
  extended = create_model("KimiMaxTextConfig", __base__=types.MaxTextConfig, model_name=(str, ...), **fields)
  base = str(Path(maxtext_module("configs").__file__).parent / "base.yml")
  try:
    with quiet():
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


def device_mesh(config: Any, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
  """Arranges devices as the configuration says; maxtext knows how the links of an accelerator lie.

  Raises:
    ConfigError: they are not as many as it wants.
  """
  try:
    with quiet():
      return maxtext_module("utils.maxtext_utils").get_mesh_from_config(config, list(devices))
  except AssertionError as error:
    raise ConfigError(f"mesh: {' '.join(str(error).split())}") from None


# --- the run ------------------------------------------------------------------------------------------------


def run(config: Any, parts: Parts) -> None:
  """Runs maxtext's own training loop with `parts` in place of its model, data and step.

  Raises:
    UserError: a checkpoint cannot be saved or does not fit, or the data are at fault.
  """
  train, train_utils = maxtext_module("trainers.pre_train.train"), maxtext_module("utils.train_utils")
  with one_complaint(), replaced(config, parts), quiet():
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
      raise known from (None if known in causes(error) else error)  # no circle


def _as_user_error(error: Exception, config: Any) -> UserError | None:
  """The one line for a failure that a user can mend, None for any other."""
  chain = causes(error)
  if users := [cause for cause in chain if isinstance(cause, UserError)]:
    return users[-1]
  text = str(error)
  first = text.partition("\n")[0]
  system = next(filter(None, map(_system_error, chain)), None)
  if any(str(cause).startswith("Checkpointing failed") for cause in chain):
    reason = f"a checkpoint cannot be saved: {system or first}{_last_whole(Path(config.checkpoint_dir))}"
    return CheckpointError(f"{config.checkpoint_dir}: {reason}")
  if system is not None:
    return InputError(str(system))
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


def _system_error(error: BaseException) -> OSError | None:
  """The operating system's own complaint, which the writer of arrays hands on as text only."""
  if isinstance(error, OSError) and error.errno is not None:
    return error
  code = re.search(r"os_error_code='(\d+)'", str(error))
  return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None


def _last_whole(directory: Path) -> str:
  whole = whole_steps(directory)
  return f"; checkpoint {whole[-1]} is whole" if whole else ""
