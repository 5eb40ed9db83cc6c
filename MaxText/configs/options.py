"""Keys of the commands, beside those of the model: one schema a command, with the defaults in base.yml.

A key may be shared by commands. A new command adds its schema to `COMMANDS`, its keys to base.yml.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MaybePath = Annotated[str | None, BeforeValidator(lambda text: text or None)]  # `key=` alone names no path


class Options(BaseModel):
  """Frozen and strict, like the model's own schema."""

  model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DecodeOptions(Options):
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


class ServeOptions(Options):
  """What `python -m MaxText.serve` does with a model."""

  checkpoint: MaybePath
  seed: int = Field(ge=0)
  max_target_length: int | None = Field(gt=1)
  prefill_chunk: int = Field(gt=0)
  host: str = Field(min_length=1)
  port: int = Field(ge=0, le=65535)
  api_key: str | None = Field(min_length=1)
  api_key_file: MaybePath
  served_model_name: str | None = Field(min_length=1)
  slots: int = Field(gt=0)
  pages: int | None = Field(gt=0)
  page_size: int = Field(gt=0)
  steps_per_round: int = Field(gt=0, le=4096)
  queue_limit: int = Field(gt=0)
  request_seconds: float = Field(gt=0)
  drain_seconds: float = Field(ge=0)
  max_body_bytes: int = Field(gt=0)

  @model_validator(mode="after")
  def _one_key(self) -> "ServeOptions":
    if self.api_key is not None and self.api_key_file is not None:
      raise ValueError("api_key: excludes api_key_file; give one")
    return self


COMMANDS: tuple[type[Options], ...] = (DecodeOptions, ConvertOptions, ServeOptions)
