"""Keys of the commands, beside those of the model: one schema a command, with the defaults in base.yml.

A key may be shared by commands. A new command adds its schema to `COMMANDS`, its keys to base.yml.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from MaxText.configs.mesh import MESH_AXES, size_key

MaybePath = Annotated[str | None, BeforeValidator(lambda text: text or None)]  # `key=` alone names no path


class Options(BaseModel):
  """Frozen and strict, like the model's own schema."""

  model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MeshOptions(Options):
  """The devices that a command runs on; without `mesh` it is one."""

  mesh: MaybePath
  ici_data_parallelism: int | None = Field(gt=0)
  ici_fsdp_parallelism: int | None = Field(gt=0)
  ici_expert_parallelism: int | None = Field(gt=0)
  ici_tensor_parallelism: int | None = Field(gt=0)

  @model_validator(mode="after")
  def _sizes_of_a_mesh(self) -> "MeshOptions":
    given = [key for key in map(size_key, MESH_AXES) if getattr(self, key) is not None]
    if given and self.mesh is None:
      raise ValueError(f"{given[0]}: needs a mesh to change: give mesh=NAME or mesh=FILE.yml")
    return self


class DecodeOptions(MeshOptions):
  """What `python -m MaxText.decode` does with a model."""

  checkpoint: MaybePath
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

  overwrite: bool
  max_shard_bytes: int = Field(gt=0)


COMMANDS: tuple[type[Options], ...] = (DecodeOptions, ConvertOptions)
