"""Keys of the commands, beside those of the model: one schema a command, with the defaults in base.yml.

A key may be shared by commands. A new command adds its schema to `COMMANDS`, its keys to base.yml.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Options(BaseModel):
  """Frozen and strict, like the model's own schema."""

  model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DecodeOptions(Options):
  """What `python -m MaxText.decode` does with a model."""

  checkpoint: str | None
  adapter: str | None
  prompt: str | None
  prompt_ids: tuple[int, ...] | None
  prompts_file: str | None
  max_new_tokens: int = Field(gt=0)
  max_target_length: int | None = Field(gt=0)
  temperature: float = Field(ge=0)
  top_k: int = Field(ge=0)
  top_p: float = Field(gt=0, le=1)
  seed: int = Field(ge=0)
  stop_ids: tuple[int, ...] | None
  output: Literal["text", "json"]
  prefill_chunk: int = Field(gt=0)
  steps_per_dispatch: int = Field(gt=0)

  @model_validator(mode="after")
  def _one_prompt(self) -> "DecodeOptions":
    given = [key for key in ("prompt", "prompt_ids", "prompts_file") if getattr(self, key) is not None]
    if len(given) > 1:
      raise ValueError(f"{' and '.join(given)} exclude each other; give one")
    return self


class ConvertOptions(Options):
  """What `python -m MaxText.convert` does with a checkpoint."""

  overwrite: bool
  max_shard_bytes: int = Field(gt=0)


COMMANDS: tuple[type[Options], ...] = (DecodeOptions, ConvertOptions)
