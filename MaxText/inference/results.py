"""What decoding gives back: one completion per prompt, and the figures of the run."""

import dataclasses
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Stats:
  """Figures of one call of generate, compile time kept apart from running time.

  Attributes:
    prompts: prompts answered.
    prompt_tokens: tokens of all prompts.
    new_tokens: tokens of all answers, stop tokens included.
    prefill_seconds: time that reading the prompts took, which also picks the first token of each answer.
    decode_seconds: time that all later tokens took.
    compile_seconds: time spent on tracing and compiling.
    first_token_seconds: from the call to the first token, compile time included.
    implementations: operation -> implementation that the programs use.
    weights: where the weights came from.
    dtype: of the activations.
    device: what ran it.
  """

  prompts: int
  prompt_tokens: int
  new_tokens: int
  prefill_seconds: float
  decode_seconds: float
  compile_seconds: float
  first_token_seconds: float
  implementations: dict[str, str]
  weights: str
  dtype: str
  device: str

  @property
  def prefill_tokens_per_second(self) -> float:
    """Prompt tokens read per second of running."""
    return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

  @property
  def decode_tokens_per_second(self) -> float | None:
    """Tokens decoded per second of running, over the whole batch; None when prefill gave them all."""
    decoded = self.new_tokens - self.prompts
    return decoded / max(self.decode_seconds, 1e-9) if decoded else None

  def as_json(self) -> dict[str, Any]:
    """Returns every figure as JSON values, rates included."""
    rates = {
      "prefill_tokens_per_second": self.prefill_tokens_per_second,
      "decode_tokens_per_second": self.decode_tokens_per_second,
    }
    return dataclasses.asdict(self) | rates

  def summary(self) -> str:
    """Returns the figures in one line."""
    decode = self.decode_tokens_per_second
    used = " ".join(f"{op}={impl}" for op, impl in self.implementations.items())
    parts = (
      f"prompt {self.prompt_tokens} tokens, new {self.new_tokens} tokens",
      f"prefill {self.prefill_tokens_per_second:.1f} tok/s",
      f"decode {decode:.1f} tok/s" if decode is not None else "decode not run",
      f"compile {self.compile_seconds:.1f} s, first token after {self.first_token_seconds:.1f} s",
      f"{self.dtype} on {self.device}",
      used,
      f"weights: {self.weights}",
    )
    return " | ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Completion:
  """The answer to one prompt.

  Attributes:
    prompt_ids: the prompt as token ids.
    token_ids: the new token ids; a stop token that ended the answer is the last of them.
    text: the new text without the stop token and other control tokens; None without a tokenizer.
    finish_reason: "stop" after a stop token, "length" after max_new_tokens or at the end of the context.
    stats: figures of the call that answered this prompt, shared with the others of its call.
  """

  prompt_ids: list[int]
  token_ids: list[int]
  text: str | None
  finish_reason: FinishReason
  stats: Stats

  def as_json(self) -> dict[str, Any]:
    """Returns the completion as JSON values; token counts in `stats` are this prompt's own."""
    own = {"prompt_tokens": len(self.prompt_ids), "new_tokens": len(self.token_ids)}
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return fields | {"stats": self.stats.as_json() | own}
