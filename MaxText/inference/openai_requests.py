"""What a client may ask, in OpenAI's interface, checked into jobs.

Fields are OpenAI's; those of ours that it lacks have the names that other servers use. A field that asks for
what is not done is refused, never ignored; a few that change nothing about an answer are taken and dropped.
"""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from MaxText.common.errors import InputError, did_you_mean
from MaxText.inference.prompts import MAX_LOGPROBS, MAX_SEED, Settings
from MaxText.tokenizers.chat import json_text

MAX_CHOICES, MAX_STOPS, MAX_STOP_LENGTH = 16, 16, 256
COMPLETION_TOKENS = 16  # of a completion that does not say: OpenAI's default
_DROPPED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_STOP = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class RequestError(InputError):
  """A request that cannot be served.

  Attributes:
    param: the field at fault.
    code: OpenAI's word for it, if there is one.
    status: of HTTP.
  """

  def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
    super().__init__(message)
    self.param, self.code, self.status = param, code, status


class _Body(BaseModel):
  model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
  """What a stream tells beside the answer."""

  include_usage: bool = False


class SamplingBody(_Body):
  """The fields that chats and completions share."""

  model: str
  max_tokens: int | None = Field(default=None, ge=1)
  temperature: float | None = Field(default=None, ge=0)
  top_p: float | None = Field(default=None, gt=0, le=1)
  top_k: int | None = Field(default=None, ge=0)
  min_p: float | None = Field(default=None, ge=0, lt=1)
  seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
  presence_penalty: float | None = Field(default=None, ge=-2, le=2)
  frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
  n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
  stop: _STOP | Annotated[list[_STOP], Field(max_length=MAX_STOPS)] | None = None
  stop_token_ids: list[int] | None = None
  stream: bool | None = None
  stream_options: StreamOptions | None = None

  @property
  def stops(self) -> tuple[str, ...]:
    """The stop strings."""
    return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

  @property
  def choices(self) -> int:
    """How many answers are wanted."""
    return self.n or 1

  @property
  def wants_usage(self) -> bool:
    """Whether a stream ends with the usage."""
    return self.stream_options is not None and self.stream_options.include_usage

  def settings(self, default_tokens: int, logprobs: int, stop_ids: tuple[int, ...]) -> list[Settings]:
    """Returns the settings of each choice; they differ in the seed only.

    Args:
      default_tokens: most new tokens where the body does not say.
      logprobs: alternatives wanted at each token.
      stop_ids: ids that end an answer, beside those of the body.
    """
    given = {
      name: value
      for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
      if (value := getattr(self, name)) is not None
    }
    first = secrets.randbelow(MAX_SEED + 1) if self.seed is None else self.seed
    one = Settings(
      max_new_tokens=self.max_tokens or default_tokens,
      temperature=1.0 if self.temperature is None else self.temperature,
      stop_ids=tuple(dict.fromkeys((*stop_ids, *(self.stop_token_ids or ())))),
      logprobs=logprobs,
      **given,
    )
    return [dataclasses.replace(one, seed=(first + i) % (MAX_SEED + 1)) for i in range(self.choices)]


class ChatBody(SamplingBody):
  """A body of /v1/chat/completions."""

  messages: list[Any]
  tools: list[Any] | None = None
  tool_choice: Any = None
  parallel_tool_calls: bool | None = None
  response_format: dict[str, Any] | None = None
  reasoning_effort: str | None = None
  chat_template_kwargs: dict[str, Any] | None = None
  max_completion_tokens: int | None = Field(default=None, ge=1)
  logprobs: bool | None = None
  top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class CompletionBody(SamplingBody):
  """A body of /v1/completions."""

  prompt: str | list[int] | list[str] | list[list[int]]
  logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
  echo: bool | None = None
  suffix: str | None = None


class TokenizeBody(_Body):
  """A body of /tokenize: a text, or a chat as it would be rendered."""

  model: str | None = None
  prompt: str | None = None
  messages: list[Any] | None = None
  tools: list[Any] | None = None
  reasoning_effort: str | None = None
  chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Body):
  """A body of /detokenize."""

  model: str | None = None
  tokens: list[int]


def read_body[Body: _Body](kind: type[Body], data: bytes) -> Body:
  """Reads the JSON of a request.

  Args:
    kind: what it has to be.
    data: the bytes.

  Raises:
    RequestError: it is no JSON, or a field is missing, unknown or out of range.
  """
  try:
    value = json_text.read(data.decode("utf-8"))
  except ValueError as failure:  # of the encoding, too
    raise RequestError(f"the body is no JSON: {failure}") from None
  if not isinstance(value, Mapping):
    raise RequestError(f"the body is {json_text.type_name(value)}, expected an object")
  try:
    # null is how a client leaves a field out
    return kind.model_validate({k: v for k, v in value.items() if k not in _DROPPED and v is not None})
  except ValidationError as failure:
    raise _request_error(failure, kind) from None


def _request_error(failure: ValidationError, kind: type[_Body]) -> RequestError:
  """The first complaint of pydantic, as one line about one field."""
  errors = failure.errors()
  if not errors[0]["loc"]:
    return RequestError(f"the body cannot be read: {errors[0]['msg']}")
  field = str(errors[0]["loc"][0])
  # of a union's alternatives, the one that got furthest says most
  error = max((e for e in errors if e["loc"][0] == field), key=lambda error: len(error["loc"]))
  if error["type"] == "extra_forbidden":
    hint = did_you_mean(field, kind.model_fields)
    name = field if field.isidentifier() else repr(field[:60])
    return RequestError(f"{name}: unknown field{hint}", field, "unknown_field")
  if error["type"] == "missing":
    return RequestError(f"{field}: this field is missing", field, "missing_field")
  shown = repr(error["input"])
  shown = shown if len(shown) <= 60 else shown[:57] + "..."
  path = "".join([field, *(f"[{part}]" for part in error["loc"][1:] if isinstance(part, int))])
  message = error["msg"][:1].lower() + error["msg"][1:]
  return RequestError(f"{path}: got {shown}; {message}", field, "invalid_value")
