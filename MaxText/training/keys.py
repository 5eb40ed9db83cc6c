"""maxtext's keys for a run of ours: its names, our values."""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from MaxText.configs.mesh import MeshConfig, size_key
from MaxText.configs.options import TrainOptions
from MaxText.configs.schema import Config
from MaxText.training.optimizer import NOT_DECAYED

ROW_LENGTH = 256  # tokens, unless max_target_length says otherwise
# what maxtext's loss and loader call the rows of a batch
_ROWS = ("activation_batch", "activation_embed_and_logits_batch")


def maxtext_keys(
  cfg: Config, options: TrainOptions, mesh: MeshConfig, passed: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
  """Returns maxtext's keys for a run.

  Args:
    cfg: the model.
    options: keys of the command.
    mesh: sizes and rules of the devices.
    passed: maxtext's own keys from the command line, which win over all others.
    directory: of the run.
  """
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
    "max_target_length": row_length(options),
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
    **_mesh_keys(mesh, slices(passed)),
    **passed,
  }


def slices(passed: Mapping[str, Any]) -> int:
  """Returns how many slices of an accelerator the `dcn_*` keys speak of."""
  sizes = [size for key, size in passed.items() if key.startswith("dcn_")]
  return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def _mesh_keys(mesh: MeshConfig, count: int) -> dict[str, Any]:
  """Devices and rows. Parameters have shardings of their own by the rules of the mesh (`training.model`)."""
  rows = list(mesh.logical_axis_rules.activation_batch)
  keys = {size_key(axis): size for axis, size in mesh.sizes.items()}
  keys |= {"logical_axis_rules": [[name, rows] for name in _ROWS]}
  keys |= {"sharding_tolerance": 1.0}  # what is replicated is listed, with its bytes
  if mesh.devices is not None:  # of a larger machine, as many as the mesh has; batches are counted by them
    keys |= {"internal_compile": True, "internal_compile_num_devices": mesh.devices * count}
  return keys


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


def row_length(options: TrainOptions) -> int:
  """Returns the tokens of a row."""
  return options.max_target_length or ROW_LENGTH


def _hardware() -> str:
  """cpu, gpu or tpu, without starting a backend: on many hosts jax has to be told of them first."""
  chosen = jax.config.jax_platforms
  if chosen:
    return {"cpu": "cpu", "tpu": "tpu"}.get(chosen.split(",")[0], "gpu")
  if importlib.util.find_spec("libtpu"):
    return "tpu"
  return "gpu" if importlib.util.find_spec("jax_cuda12_plugin") else "cpu"
