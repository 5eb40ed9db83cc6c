"""One training run: configuration, data and model handed to maxtext's loop, and what it reports.

A run's directory holds config.json and the tokenizer, as every checkpoint does, `metrics.jsonl`, and Orbax
checkpoints below `checkpoints/`.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpoints.adapters import save_adapters
from MaxText.checkpoints.directory import (
  ROUNDED_KEY,
  RUN_FILE,
  kind,
  read_orbax_file,
  run_checkpoint,
  write_companions,
  write_orbax_file,
)
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.reader import read_json
from MaxText.common.errors import CheckpointError, ConfigError, TrainingError
from MaxText.configs import loader
from MaxText.configs.comparison import architecture_differences
from MaxText.configs.counts import count
from MaxText.configs.mesh import MeshConfig
from MaxText.configs.options import TrainOptions
from MaxText.configs.published import from_published
from MaxText.configs.schema import Config
from MaxText.layers.lora import LoRAParam
from MaxText.models import registry
from MaxText.models.adapters import merged
from MaxText.models.kimi_k3 import KimiDecoder
from MaxText.models.sharding import Layout, describe_layout, find_devices, parameter_shardings
from MaxText.tokenizers.chat.formats import ChatFormat
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.training import compat, data
from MaxText.training.chat_rows import Chats, find_chats, packed_chats
from MaxText.training.documents import Documents, find_documents
from MaxText.training.keys import maxtext_keys, row_length, slices
from MaxText.training.model import TrainedDecoder
from MaxText.training.optimizer import muon_dimensions
from MaxText.training.parts import Parts
from MaxText.training.progress import Progress, Record

ADAPTERS_FILE = "adapters.safetensors"  # beside config.json, when a run that trains adapters has ended
MOMENTS = {"adamw": 2, "adam_pax": 2, "muon": 1, "sgd": 0}  # muon keeps one of a matrix, nearly all weights


def trained_config(cfg: Config) -> Config:
  """Returns how a model is trained: scanned where `auto` leaves it open, weights that gradients reach."""
  update: dict[str, Any] = {"expert_weights": "dequantized"}
  if cfg.scan_layers == "auto":
    update["scan_layers"] = True
  if cfg.weight_dtype is None:
    update["weight_dtype"] = "float32"
  return cfg.model_copy(update=update)


def train(
  cfg: Config,
  options: TrainOptions,
  passed: Mapping[str, Any],
  tokenizer: KimiTokenizer | None,
  companions: Path | None,
  chat: tuple[ChatFormat, ChatOptions] | None = None,
) -> Path:
  """Trains a model and returns the directory of the run.

  Args:
    cfg: the model.
    options: keys of the command.
    passed: maxtext's own keys, which win over `options`.
    tokenizer: of the texts; None for synthetic data.
    companions: directory that the tokenizer came from, whose files the run keeps.
    chat: how conversations are rendered, where the data are such; None for texts.

  Raises:
    UserError: something given cannot be used, the loss is no number, or a checkpoint cannot be saved.
  """
  cfg = trained_config(cfg)
  _check_length(cfg, row_length(options))
  mesh = loader.load_training_mesh(options)
  directory = Path(options.base_output_directory, options.run_name or cfg.model_name).absolute()
  documents = _documents(options) if chat is None else _chats(options, *chat)
  compat.require()
  config = compat.build_config(cfg, maxtext_keys(cfg, options, mesh, passed, directory))
  decoder = registry.abstract(cfg)
  layout = _layout(decoder, mesh, config, slices(passed))
  _check_adapters(cfg, options, directory)
  saves, leads = config.enable_checkpointing, jax.process_index() == 0  # of many processes one writes
  if saves:
    is_new = _check_directory(directory, cfg)
    multihost_utils.sync_global_devices("directory checked")  # before it holds half of what is looked for
    if is_new and leads:
      _prepare(directory, cfg, companions)
  if layout.mesh.size > 1 and leads:
    print(describe_layout(layout, decoder), file=sys.stderr)
  record = Record(directory / "metrics.jsonl" if saves else None)
  progress = Progress(config.steps, config.global_batch_size_to_train_on * config.max_target_length)
  try:
    compat.run(config, _parts(cfg, options, config, layout, documents, tokenizer, progress, record))
  finally:
    progress.close()
  if cfg.lora_rank and saves:
    trained = load_params(directory, cfg, mesh_shardings=partial(_whole_adapters, layout), progress=False)
    if leads:
      save_adapters(trained, cfg, directory / ADAPTERS_FILE)
  return directory


def _whole_adapters(layout: Layout, decoder: KimiDecoder) -> dict[str, NamedSharding]:
  """The layout of the run, but with whole adapters on every device, so that each process can write them."""
  adapters = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(decoder, LoRAParam))}
  whole = NamedSharding(layout.mesh, PartitionSpec())
  shardings = parameter_shardings(layout, decoder)
  return {path: whole if path in adapters else sharding for path, sharding in shardings.items()}


def _layout(decoder: KimiDecoder, mesh: MeshConfig, config: Any, count: int) -> Layout:
  """Lays the model out on the devices.

  Raises:
    UserError: too few devices, or a dimension does not divide over them.
  """
  devices = find_devices(mesh, count)
  layout = Layout(compat.device_mesh(config, devices), mesh.logical_axis_rules, f"mesh {mesh.mesh_name}")
  parameter_shardings(layout, decoder)
  return layout


def _check_length(cfg: Config, length: int) -> None:
  if length > cfg.max_position_embeddings:
    most = cfg.max_position_embeddings
    raise ConfigError(f"max_target_length: {length} exceeds the model's max_position_embeddings {most}")


# --- directory ----------------------------------------------------------------------------------------------


def _check_directory(directory: Path, cfg: Config) -> bool:
  """Returns whether the run is new; checks that one to go on with has the same architecture."""
  stored = directory / "config.json"
  if (directory / RUN_FILE).is_file():
    theirs = from_published(read_json(stored), str(stored))
    differing = [f"{key} {then} then, {now} now" for key, then, now in architecture_differences(theirs, cfg)]
    if differing:
      raise CheckpointError(f"{directory}: a run of another architecture: {'; '.join(differing[:4])}")
    layout = read_orbax_file(directory, RUN_FILE)["layout"]
    given = {"scan_layers": cfg.scan_layers, "weight_dtype": cfg.parameter_dtype, ROUNDED_KEY: cfg.mxfp4_qat}
    for key, now in given.items():
      if (then := layout.get(key, now)) != now:
        another = f"to change it, give another run_name and checkpoint={directory}"
        raise CheckpointError(f"{directory}: {key} is {then} in this run, {now} now; {another}")
    return False
  if kind(directory):
    raise CheckpointError(f"{directory}: holds a checkpoint and no run; give another run_name")
  return True


def _prepare(directory: Path, cfg: Config, companions: Path | None) -> None:
  """Makes the directory of a new run."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
    write_companions(directory, cfg, companions)
    write_orbax_file(directory, RUN_FILE, cfg)
  except OSError as error:
    raise CheckpointError(f"{directory}: cannot be written: {error}") from None


# --- data ---------------------------------------------------------------------------------------------------


def _documents(options: TrainOptions) -> dict[str, Documents]:
  """Training and evaluation documents by key, opened before anything slow."""
  if options.dataset_type == "synthetic":
    return {}
  column = options.train_data_columns
  found = {"grain_train_files": find_documents("grain_train_files", options.grain_train_files, column)}
  if options.eval_interval is not None:
    found["grain_eval_files"] = find_documents("grain_eval_files", options.grain_eval_files, column)
  return found


def _chats(options: TrainOptions, chat: ChatFormat, rendering: ChatOptions) -> dict[str, Chats]:
  """Training and evaluation chats by key, read and rendered before anything slow."""
  keys = ["grain_train_files"] + ["grain_eval_files"] * (options.eval_interval is not None)
  length = row_length(options)
  return {key: find_chats(key, getattr(options, key), chat, length, rendering) for key in keys}


# --- parts of the loop --------------------------------------------------------------------------------------


def _parts(cfg, options, config, layout, documents, tokenizer, progress, record) -> Parts:
  datasets = {key: None for key in ("grain_train_files", "grain_eval_files")}
  for key, found in documents.items():
    training = key == "grain_train_files"
    rows = config.global_batch_size_to_load if training else config.global_batch_size_to_load_eval
    form: dict[str, Any] = {
      "batch": rows // jax.process_count(),
      "length": config.max_target_length,
      "seed": options.seed if training and options.enable_data_shuffling else None,
      "epochs": options.num_epoch if training else 1,
      "shard": (jax.process_index(), jax.process_count()),
    }
    if isinstance(found, Chats):
      datasets[key] = packed_chats(found, **form)
    else:
      threads = options.grain_worker_count
      form |= {"threads": threads, "window": options.grain_shuffle_buffer_size}
      datasets[key] = data.packed_documents(found, tokenizer, cfg.eos_token_id, **form)
  # where adapters are trained, everything else is frozen, and so are the router biases
  balance = 0.0 if cfg.lora_rank else options.routed_bias_update_rate
  leads = jax.process_index() == 0
  tokens = config.per_device_batch_size * config.gradient_accumulation_steps * config.max_target_length
  return Parts(
    mesh=layout.mesh,
    model=lambda rngs: TrainedDecoder(cfg, layout, rngs=rngs),
    after_step=lambda model: model.settle_experts(balance),
    train_data=datasets["grain_train_files"],
    eval_data=datasets["grain_eval_files"],
    initial_weights=lambda abstract: _initial_weights(cfg, options.checkpoint, layout),
    muon=muon_dimensions,
    tflops=6 * count(cfg).active * tokens / 1e12,
    on_step=(lambda step, scalars: progress.step(step, *_told(scalars))) if leads else (lambda *_: None),
    on_metrics=record if leads else (lambda *_: None),
    on_stop=_stop,
    on_end=lambda steps: print(f"the data ended after {steps} steps", file=sys.stderr),
  )


def _check_adapters(cfg: Config, options: TrainOptions, directory: Path) -> None:
  """Refuses adapters of weights that are random, and those of a run that went without them."""
  if cfg.lora_rank and options.checkpoint is None and run_checkpoint(directory) is None:
    raise ConfigError("lora_rank: adapters need weights to adapt; name them: checkpoint=DIR")


def _initial_weights(cfg: Config, checkpoint: str | None, layout: Layout) -> dict | None:
  """Weights of a checkpoint as the nested dictionaries that maxtext overlays, or None to keep drawn ones."""
  if checkpoint is None:
    return None
  # adapters of an earlier run become part of the weights that new ones start from
  base = cfg.model_copy(update={"lora_rank": 0})
  tree = ParameterTree(
    merged(load_params(checkpoint, base, mesh_shardings=partial(parameter_shardings, layout)))
  )
  nested: dict = {}
  for path, array in tree.values.items():
    *parents, name = (int(key) if key.isdigit() else key for key in ("decoder." + path).split("."))
    node = nested
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = array
  return nested


def _told(scalars: Mapping[str, Any]) -> tuple[float, int]:
  return float(scalars["learning/lm_loss"]), int(scalars.get("moe/dropped_rows", 0))


def _stop(step: int, state: nnx.State, metrics: Mapping[str, Any]) -> None:
  """Raises the one line about a step whose loss or gradient is no number."""
  loss = float(metrics["scalar"]["learning/lm_loss"])
  raise TrainingError(f"step {step + 1}: the loss is {loss}: {_first_bad(state, metrics['bad_gradients'])}")


def _first_bad(state: nnx.State, bad_gradients: Mapping[str, Any]) -> str:
  for path, variable in nnx.to_flat_state(state["model"]["decoder"]):
    values = np.asarray(variable[...], np.float32)
    if not np.isfinite(values).all():
      name, count_ = ".".join(map(str, path)), int((~np.isfinite(values)).sum())
      return f"parameter {name} holds {count_:,} values of {values.size:,} that are no finite number"
  names = [name.removeprefix("decoder.") for name, bad in bad_gradients.items() if bool(bad)]
  if not names:
    return "all parameters and gradients are finite"
  return f"all parameters are finite; gradient of {names[0]} is not, nor {len(names) - 1} others"
