"""What a request asks of a chat besides its messages."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from MaxText.common.errors import did_you_mean
from MaxText.tokenizers.chat.messages import Conversation, MessageError

EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")
FORMATS = ("text", "json_object", "json_schema")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions:
  """Options of one rendering; values as in OpenAI's interface.

  Attributes:
    thinking: whether the model thinks before it answers.
    thinking_effort: how much; None says nothing about it.
    tool_choice: whether it may, must not or must call a tool.
    response_format: None, or an object whose `type` is `text`, `json_object`, or `json_schema` with a schema.
    generation_prompt: end with the beginning of an answer, for the model to go on.

  Raises:
    MessageError: a value is not supported.
  """

  thinking: bool = True
  thinking_effort: Literal["low", "high", "max"] | None = "max"
  tool_choice: Literal["auto", "none", "required"] = "auto"
  response_format: Mapping[str, Any] | None = None
  generation_prompt: bool = True

  def __post_init__(self):
    if self.thinking_effort is not None:
      _check_choice("reasoning_effort", self.thinking_effort, EFFORTS)
    if isinstance(self.tool_choice, Mapping):
      raise MessageError(
        "tool_choice", "a function by name is not supported, expected one of auto, none, required"
      )
    _check_choice("tool_choice", self.tool_choice, TOOL_CHOICES)
    if self.response_format is not None:
      _check_format(self.response_format)

  def check(self, conversation: Conversation) -> None:
    """Raises a `MessageError` if a tool must be called and none is declared."""
    if self.tool_choice == "required" and not conversation.has_tools:
      raise MessageError("tool_choice", "'required', but there are no tools")

  @property
  def response_type(self) -> str:
    """`text`, `json_object` or `json_schema`."""
    return "text" if self.response_format is None else self.response_format["type"]


def _check_choice(param: str, value: Any, known: tuple[str, ...]) -> None:
  if value not in known:
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    raise MessageError(param, f"expected one of {', '.join(known)}, got {value!r}{hint}")


def _check_format(value: Any) -> None:
  if not isinstance(value, Mapping):
    raise MessageError("response_format", f"expected an object with 'type', got {type(value).__name__}")
  _check_choice("response_format.type", value.get("type"), FORMATS)
  if value["type"] != "json_schema":
    return
  described = value.get("json_schema")
  if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
    raise MessageError("response_format.json_schema.schema", "expected a JSON schema, got none")
