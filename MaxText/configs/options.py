"""Keys of the commands, beside those of the model: one schema a command, with the defaults in base.yml.

A key may be shared by commands. A new command adds its schema to `COMMANDS`, its keys to base.yml.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from MaxText.configs.mesh import MESH_AXES, size_key, size_problems

DEFAULT_CONTEXT = 8192  # tokens of a served request where max_target_length does not say
MaybePath = Annotated[str | None, BeforeValidator(lambda text: text or None)]  # `key=` alone names no path


def _split(given: object) -> object:
  """Turns "64,128" into ("64", "128") or (64, 128): maxtext's files write lists as text."""
  if not isinstance(given, str):
    return given
  words = [word.strip() for word in given.split(",")]
  return tuple(int(word) if word.isdecimal() else word for word in words)


class Options(BaseModel):
  """Frozen and strict, like the model's own schema."""

  model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MeshOptions(Options):
  """The devices that a command runs on."""

  has_mesh: ClassVar[bool] = False  # whether the command has a mesh of its own where none is named

  mesh: MaybePath
  ici_data_parallelism: int | None = Field(ge=-1)
  ici_fsdp_parallelism: int | None = Field(ge=-1)
  ici_expert_parallelism: int | None = Field(ge=-1)
  ici_tensor_parallelism: int | None = Field(ge=-1)

  @property
  def mesh_sizes(self) -> dict[str, int]:
    """The sizes that are given, by key."""
    sizes = {key: getattr(self, key) for key in map(size_key, MESH_AXES)}
    return {key: size for key, size in sizes.items() if size is not None}

  @model_validator(mode="after")
  def _sizes_are_possible(self) -> "MeshOptions":
    for key, problem in size_problems(self.mesh_sizes):
      raise ValueError(f"{key}: {problem}")
    if self.mesh_sizes and self.mesh is None and not self.has_mesh:
      key = next(iter(self.mesh_sizes))
      raise ValueError(f"{key}: needs a mesh to change: give mesh=NAME or mesh=FILE.yml")
    return self


class DecodeOptions(MeshOptions):
  """What `python -m MaxText.decode` does with a model."""

  checkpoint: MaybePath
  adapters: MaybePath
  prompt: str | None
  prompt_ids: tuple[int, ...] | None
  prompts_file: MaybePath
  max_new_tokens: int = Field(gt=0)
  max_target_length: int | None = Field(gt=0)
  temperature: float = Field(ge=0)
  top_k: int = Field(ge=0)
  top_p: float = Field(gt=0, le=1)
  seed: int = Field(ge=0)
  stop_ids: tuple[int, ...] | None
  output: Literal["text", "json"]
  prefill_chunk: int = Field(gt=0)
  steps_per_dispatch: int = Field(gt=0, le=4096)  # width of an array that a dispatch returns

  @model_validator(mode="after")
  def _one_prompt(self) -> "DecodeOptions":
    given = [key for key in ("prompt", "prompt_ids", "prompts_file") if getattr(self, key) is not None]
    if len(given) > 1:
      raise ValueError(f"{given[0]}: excludes {' and '.join(given[1:])}; give one")
    return self


class ConvertOptions(Options):
  """What `python -m MaxText.convert` does with a checkpoint."""

  adapters: MaybePath
  overwrite: bool
  max_shard_bytes: int = Field(gt=0)


class EngineOptions(Options):
  """What everything that runs the engine needs to know: the weights, the memory of its requests."""

  checkpoint: MaybePath
  seed: int = Field(ge=0)
  max_target_length: int | None = Field(gt=1)
  prefill_chunk: int = Field(gt=0)
  slots: int = Field(gt=0)
  page_size: int = Field(gt=0)

  def pages_of_all_slots(self, context: int) -> int:
    """Returns the pages that every slot with a request of `context` tokens takes."""
    return self.slots * -(-context // self.page_size)

  def tokens_of_a_slot(self, pages: int) -> int:
    """Returns the tokens that each slot has room for where all slots share `pages` alike."""
    return -(-pages // self.slots) * self.page_size


class ServerOptions(EngineOptions):
  """What every server needs to know beside that: its address, and how it ends."""

  host: str = Field(min_length=1)
  port: int = Field(ge=0, le=65535)
  drain_seconds: float = Field(ge=0)

  def context(self, longest: int) -> int:
    """Returns the most tokens of a request with a model that knows positions up to `longest`."""
    return min(longest, self.max_target_length or DEFAULT_CONTEXT)


class JetStreamOptions(ServerOptions):
  """What `python -m MaxText.inference.jetstream_server` does with a model; all requests sample alike."""

  temperature: float = Field(ge=0)
  top_k: int = Field(ge=0)
  top_p: float = Field(gt=0, le=1)


class ServeOptions(ServerOptions, MeshOptions):
  """What `python -m MaxText.serve` does with a model."""

  api_key: str | None = Field(min_length=1)
  api_key_file: MaybePath
  served_model_name: str | None = Field(min_length=1)
  pages: int | None = Field(gt=0)
  steps_per_round: int = Field(gt=0, le=4096)
  queue_limit: int = Field(gt=0)
  request_seconds: float = Field(gt=0)
  max_body_bytes: int = Field(gt=0)

  @model_validator(mode="after")
  def _one_key(self) -> "ServeOptions":
    if self.api_key is not None and self.api_key_file is not None:
      raise ValueError("api_key: excludes api_key_file; give one")
    return self


Stage = Literal["prefill", "insert", "prefill-multisampling", "generate", "sweep", "end-to-end"]


class MicrobenchmarkOptions(EngineOptions):
  """What `python -m MaxText.inference_microbenchmark` does with a model; long names are maxtext's."""

  max_new_tokens: int = Field(gt=1)
  pages: int | None = Field(gt=0)
  steps_per_round: int = Field(gt=0, le=4096)
  inference_microbenchmark_stages: Annotated[tuple[Stage, ...], BeforeValidator(_split)]
  inference_microbenchmark_prefill_lengths: Annotated[tuple[int, ...], BeforeValidator(_split)]
  inference_microbenchmark_loop_iters: int = Field(gt=0)
  inference_microbenchmark_log_file_path: MaybePath
  inference_microbenchmark_num_samples: Annotated[tuple[int, ...], BeforeValidator(_split)]
  inference_microbenchmark_plot_path: MaybePath
  inference_microbenchmark_batch_sizes: tuple[int, ...] | None
  inference_microbenchmark_context_lengths: Annotated[tuple[int, ...], BeforeValidator(_split)]
  inference_microbenchmark_requests: int | None = Field(gt=0)

  @model_validator(mode="after")
  def _counts_something(self) -> "MicrobenchmarkOptions":
    for key in ("stages", "prefill_lengths", "num_samples", "batch_sizes", "context_lengths"):
      given = getattr(self, name := f"inference_microbenchmark_{key}")
      if given is not None and not given:
        raise ValueError(f"{name}: got an empty list, expected at least one entry")
      if wrong := [each for each in given or () if isinstance(each, int) and each < 1]:
        raise ValueError(f"{name}: got {wrong[0]}, expected whole numbers > 0")
    return self


class TrainOptions(MeshOptions):
  """What `python -m MaxText.train` does with a model; `training/run.py` hands most of it on to maxtext."""

  has_mesh: ClassVar[bool] = True

  checkpoint: str | None
  seed: int = Field(ge=0, lt=2**32)
  # --- run
  run_name: str | None
  base_output_directory: str
  steps: int = Field(gt=0)
  # --- data
  dataset_type: Literal["grain", "synthetic"]
  grain_train_files: str | None
  grain_eval_files: str | None
  train_data_columns: str
  tokenizer_path: str | None
  enable_data_shuffling: bool
  grain_shuffle_buffer_size: int = Field(gt=0)
  num_epoch: int | None = Field(gt=0)
  grain_worker_count: int = Field(ge=0)
  per_device_batch_size: int = Field(gt=0)
  max_target_length: int | None = Field(gt=0)
  # --- optimizer
  opt_type: Literal["adamw", "muon", "adam_pax", "sgd"]
  learning_rate: float = Field(ge=0)
  learning_rate_schedule_steps: int | None = Field(gt=0)
  warmup_steps_fraction: float = Field(ge=0, le=1)
  gradient_accumulation_steps: int = Field(gt=0)
  gradient_clipping_threshold: float = Field(ge=0)
  adam_weight_decay: float = Field(ge=0)
  muon_weight_decay: float = Field(ge=0)
  routed_bias_update_rate: float = Field(ge=0)
  # --- checkpoints and measurements
  enable_checkpointing: bool
  checkpoint_period: int = Field(gt=0)
  max_num_checkpoints_to_keep: int | None = Field(gt=0)
  eval_interval: int | None = Field(gt=0)
  eval_steps: int = Field(gt=0)
  enable_tensorboard: bool

  @model_validator(mode="after")
  def _evaluates_something(self) -> "TrainOptions":
    if self.eval_interval is not None and self.grain_eval_files is None and self.dataset_type == "grain":
      raise ValueError("eval_interval: needs grain_eval_files, what to measure on")
    return self


class SftOptions(TrainOptions):
  """What `python -m MaxText.sft` does with a model: training, on conversations."""

  thinking: bool
  thinking_effort: Literal["low", "high", "max"] | None


COMMANDS: tuple[type[Options], ...] = (
  DecodeOptions,
  ConvertOptions,
  TrainOptions,
  SftOptions,
  JetStreamOptions,
  ServeOptions,
  MicrobenchmarkOptions,
)
