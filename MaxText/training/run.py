"""One training run: configuration, data and model handed to maxtext's loop, and what it reports.

A run's directory holds config.json and the tokenizer, as every checkpoint does, `metrics.jsonl`, and Orbax
checkpoints below `checkpoints/`.
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from MaxText.checkpoints.adapters import save_adapters
from MaxText.checkpoints.directory import (
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
from MaxText.configs.comparison import architecture_differences
from MaxText.configs.counts import count
from MaxText.configs.options import TrainOptions
from MaxText.configs.published import from_published
from MaxText.configs.schema import Config
from MaxText.models.adapters import merged
from MaxText.tokenizers.chat.formats import ChatFormat
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.training import compat, data
from MaxText.training.chat_rows import Chats, find_chats, packed_chats
from MaxText.training.documents import Documents, find_documents
from MaxText.training.model import TrainedDecoder
from MaxText.training.optimizer import NOT_DECAYED, muon_dimensions
from MaxText.training.progress import Progress, Record

# axis names of our parameters that maxtext's own rules lack, and the mesh axes that split them: the latent is
# split over fsdp where the experts stand, over tensor beside the embedding, which has taken fsdp
AXIS_RULES = [
  *(["expert", "expert"], ["expert_mlp", ["tensor"]], ["latent", ["fsdp"]], ["latent", ["tensor"]]),
  ["head_dim", []],
]
ADAPTERS_FILE = "adapters.safetensors"  # beside config.json, when a run that trains adapters has ended
ROW_LENGTH = 256  # tokens, unless max_target_length says otherwise


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
  _check_length(cfg, _row_length(options))
  directory = Path(options.base_output_directory, options.run_name or cfg.model_name).absolute()
  documents = _documents(options) if chat is None else _chats(options, *chat)
  compat.require()
  keys = maxtext_keys(cfg, options, directory) | dict(passed)
  config = compat.build_config(cfg, keys)
  if config.enable_checkpointing:
    _prepare(directory, cfg, companions)
  _check_adapters(cfg, options, directory)
  record = Record(directory / "metrics.jsonl" if config.enable_checkpointing else None)
  progress = Progress(config.steps, config.global_batch_size_to_train_on * config.max_target_length)
  try:
    compat.run(config, _parts(cfg, options, config, documents, tokenizer, progress, record))
  finally:
    progress.close()
  if cfg.lora_rank and config.enable_checkpointing:
    save_adapters(load_params(directory, cfg, progress=False), cfg, directory / ADAPTERS_FILE)
  return directory


def maxtext_keys(cfg: Config, options: TrainOptions, directory: Path) -> dict[str, Any]:
  """Returns maxtext's keys for a run: its names, our values."""
  hardware = _hardware()
  return {
    **_architecture_keys(cfg),
    "run_name": directory.name,
    "base_output_directory": str(directory.parent),
    "log_config": False,
    "hardware": hardware,
    "skip_jax_distributed_system": hardware == "cpu",
    "steps": options.steps,
    "dataset_type": options.dataset_type,
    "grain_train_files": options.grain_train_files or "standard library",
    "grain_eval_files": options.grain_eval_files or "",
    "per_device_batch_size": options.per_device_batch_size,
    "max_target_length": _row_length(options),
    "init_weights_seed": options.seed,
    "data_shuffle_seed": options.seed,
    "opt_type": options.opt_type,
    "learning_rate": options.learning_rate,
    "learning_rate_schedule_steps": options.learning_rate_schedule_steps or -1,
    "warmup_steps_fraction": options.warmup_steps_fraction,
    "gradient_accumulation_steps": options.gradient_accumulation_steps,
    "gradient_clipping_threshold": options.gradient_clipping_threshold,
    # muon's own Adam has no mask, so nothing that it updates may decay
    "adam_weight_decay": 0.0 if options.opt_type == "muon" else options.adam_weight_decay,
    "muon_weight_decay": options.muon_weight_decay,
    "muon_consistent_rms": 0.2,  # updates as large as Adam's, so that one learning rate serves both
    "adamw_mask": list(NOT_DECAYED),
    "enable_checkpointing": options.enable_checkpointing,
    "save_checkpoint_on_start": False,
    "checkpoint_period": options.checkpoint_period,
    "max_num_checkpoints_to_keep": options.max_num_checkpoints_to_keep,
    "eval_interval": options.eval_interval or -1,
    "eval_steps": options.eval_steps,
    "enable_tensorboard": options.enable_tensorboard,
    "abort_on_nan_loss": False,  # ours says which parameter, and undoes the step
    "ici_data_parallelism": options.ici_data_parallelism or 1,
    "ici_fsdp_parallelism": options.ici_fsdp_parallelism or -1,
    "ici_tensor_parallelism": options.ici_tensor_parallelism or 1,
    "ici_expert_parallelism": options.ici_expert_parallelism or 1,
    "logical_axis_rules": AXIS_RULES,
  }


def _architecture_keys(cfg: Config) -> dict[str, Any]:
  """The keys that both configurations have; maxtext reads the vocabulary, the rest is for its logs."""
  return {
    "model_name": cfg.model_name,
    "override_model_config": True,
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "vocab_size": cfg.vocab_size,
    "base_emb_dim": cfg.base_emb_dim,
    "base_num_decoder_layers": cfg.base_num_decoder_layers,
    "base_mlp_dim": cfg.base_mlp_dim,
    "base_moe_mlp_dim": cfg.base_moe_mlp_dim,
    "base_num_query_heads": cfg.base_num_query_heads,
    "base_num_kv_heads": cfg.base_num_query_heads,
    "first_num_dense_layers": cfg.first_num_dense_layers,
    "num_experts": cfg.num_experts,
    "num_experts_per_tok": cfg.num_experts_per_tok,
    "shared_experts": cfg.shared_experts,
    "scan_layers": cfg.scan_layers,
    "dtype": cfg.dtype,
    "weight_dtype": cfg.parameter_dtype,
    "logits_via_embedding": cfg.logits_via_embedding,
    "tokenizer_path": "unused",  # the tokenizer is ours; left out, maxtext would look for its own
  }


def _row_length(options: TrainOptions) -> int:
  return options.max_target_length or ROW_LENGTH


def _check_length(cfg: Config, length: int) -> None:
  if length > cfg.max_position_embeddings:
    most = cfg.max_position_embeddings
    raise ConfigError(f"max_target_length: {length} exceeds the model's max_position_embeddings {most}")


def _hardware() -> str:
  """cpu, gpu or tpu, without starting a backend: on many hosts jax has to be told of them first."""
  chosen = jax.config.jax_platforms
  if chosen:
    return {"cpu": "cpu", "tpu": "tpu"}.get(chosen.split(",")[0], "gpu")
  if importlib.util.find_spec("libtpu"):
    return "tpu"
  return "gpu" if importlib.util.find_spec("jax_cuda12_plugin") else "cpu"


# --- directory ----------------------------------------------------------------------------------------------


def _prepare(directory: Path, cfg: Config, companions: Path | None) -> None:
  """Makes the directory of a new run, or checks that the one of an earlier run has the same architecture."""
  stored = directory / "config.json"
  if (directory / RUN_FILE).is_file():
    theirs = from_published(read_json(stored), str(stored))
    differing = [f"{key} {then} then, {now} now" for key, then, now in architecture_differences(theirs, cfg)]
    if differing:
      raise CheckpointError(f"{directory}: a run of another architecture: {'; '.join(differing[:4])}")
    layout = read_orbax_file(directory, RUN_FILE)["layout"]
    for key, now in (("scan_layers", cfg.scan_layers), ("weight_dtype", cfg.parameter_dtype)):
      if layout[key] != now:
        raise CheckpointError(f"{directory}: {key} is {layout[key]} in this run, {now} now")
    return
  if kind(directory):
    raise CheckpointError(f"{directory}: holds a checkpoint and no run; give another run_name")
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
  length = _row_length(options)
  return {key: find_chats(key, getattr(options, key), chat, length, rendering) for key in keys}


# --- parts of the loop --------------------------------------------------------------------------------------


def _parts(cfg, options, config, documents, tokenizer, progress, record) -> compat.Parts:
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
  tokens = config.per_device_batch_size * config.gradient_accumulation_steps * config.max_target_length
  return compat.Parts(
    model=lambda mesh, rngs: TrainedDecoder(cfg, mesh, rngs=rngs),
    after_step=lambda model: {"moe/busiest_expert": model.balance_routers(balance)},
    train_data=datasets["grain_train_files"],
    eval_data=datasets["grain_eval_files"],
    initial_weights=lambda abstract: _initial_weights(cfg, options.checkpoint),
    muon=muon_dimensions,
    tflops=6 * count(cfg).active * tokens / 1e12,
    on_step=lambda step, scalars: progress.step(step, float(scalars["learning/lm_loss"])),
    on_metrics=record,
    on_stop=_stop,
    on_end=lambda steps: print(f"the data ended after {steps} steps", file=sys.stderr),
  )


def _check_adapters(cfg: Config, options: TrainOptions, directory: Path) -> None:
  """Refuses adapters of weights that are random, and those of a run that went without them."""
  if cfg.lora_rank and options.checkpoint is None and run_checkpoint(directory) is None:
    raise ConfigError("lora_rank: adapters need weights to adapt; name them: checkpoint=DIR")


def _initial_weights(cfg: Config, checkpoint: str | None) -> dict | None:
  """Weights of a checkpoint as the nested dictionaries that maxtext overlays, or None to keep drawn ones."""
  if checkpoint is None:
    return None
  # adapters of an earlier run become part of the weights that new ones start from
  tree = ParameterTree(merged(load_params(checkpoint, cfg.model_copy(update={"lora_rank": 0}))))
  nested: dict = {}
  for path, array in tree.values.items():
    *parents, name = (int(key) if key.isdigit() else key for key in ("decoder." + path).split("."))
    node = nested
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = array
  return nested


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
