"""The chat format of Kimi-Linear, which is that of Kimi K2.

    <|im_user|>user<|im_middle|>TEXT<|im_end|>

Calls follow an answer's text in one section, each an id and its JSON arguments between markers of their own.
A function's name stands nowhere but in the id, `functions.NAME:NUMBER`; an id of another form is replaced by
one of this form, in the call and in its result.

Source: spec section 8; Kimi K2's published chat template. **Not verified** against Kimi-Linear's own release:
that no system message is added where a conversation has none (Kimi K2 adds one that names it Kimi), the order
of the keys in the declared tools, and that the numbers of calls run through the conversation. The format has
no thinking, no tool choice and no response format.
"""

import re
from collections.abc import Iterator

from MaxText.tokenizers.chat import json_text
from MaxText.tokenizers.chat.messages import (
  AssistantMessage,
  Conversation,
  Message,
  MessageError,
  TextMessage,
  ToolCall,
  ToolResult,
  ToolsMessage,
)
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.chat.segments import Encoder, Rendered, Segment, encode

SYSTEM, USER, ASSISTANT = "<|im_system|>", "<|im_user|>", "<|im_assistant|>"
MIDDLE, END = "<|im_middle|>", "<|im_end|>"
SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = (
  "<|tool_call_begin|>",
  "<|tool_call_argument_begin|>",
  "<|tool_call_end|>",
)
MARKERS = (
  *(SYSTEM, USER, ASSISTANT, MIDDLE, END),
  *(SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END),
)


def render(conversation: Conversation, tokenizer: Encoder, options: ChatOptions | None = None) -> Rendered:
  """Returns the token ids of a conversation, and which of them the model itself generates.

  Args:
    conversation: checked messages and tools.
    tokenizer: a vocabulary that has the markers.
    options: what the request asks for. Thinking and its effort mean nothing in this format;
      `tool_choice="none"` leaves out the tools that stand before the conversation.

  Raises:
    MessageError: an option or a message that the format cannot express.
    InputError: the vocabulary lacks a marker.
  """
  return encode(segments(conversation, options or ChatOptions()), tokenizer)


def segments(conversation: Conversation, options: ChatOptions) -> Iterator[Segment]:
  """Yields the conversation piece by piece; arguments as `render`."""
  if options.tool_choice == "required":
    raise MessageError(
      "tool_choice", "'required' cannot be expressed in Kimi-Linear's format, expected auto or none"
    )
  if options.response_type != "text":
    raise MessageError(
      "response_format.type", f"{options.response_type!r} cannot be expressed, expected 'text'"
    )
  if conversation.tools and options.tool_choice != "none":
    yield from _turn(SYSTEM, "tool_declare", json_text.compact(conversation.tools))
  ids = _CallIds()
  for position, message in enumerate(conversation.messages):
    yield from _message(message, ids, f"messages[{position}]")
  if options.generation_prompt:
    yield from _head(ASSISTANT, "assistant")


class _CallIds:
  """The ids under which the model knows its calls."""

  def __init__(self):
    self._count = 0
    self._current: list[str] = []

  def begin(self, calls: tuple[ToolCall, ...]) -> list[str]:
    """Returns the ids of a message's calls."""
    self._current = [self._id_of(call, self._count + i) for i, call in enumerate(calls)]
    self._count += len(calls)
    return self._current

  def __getitem__(self, call: int) -> str:
    return self._current[call]

  def _id_of(self, call: ToolCall, number: int) -> str:
    is_own = call.id and re.fullmatch(rf"functions\.{re.escape(call.name)}:\d+", call.id)
    return call.id if is_own else f"functions.{call.name}:{number}"


def _message(message: Message, ids: _CallIds, at: str) -> Iterator[Segment]:
  match message:
    case AssistantMessage():
      if message.reasoning.strip():
        raise MessageError(f"{at}.reasoning_content", "Kimi-Linear's format has no thinking")
      yield from _head(ASSISTANT, message.name or "assistant")
      is_output = message.weight > 0
      yield from (
        piece._replace(is_output=is_output) for piece in answer(message, ids.begin(message.tool_calls))
      )
    case ToolResult():
      text = f"## Return of {ids[message.call]}\n{''.join(message.parts)}"
      yield from _turn(SYSTEM, message.name or "tool", text)
    case TextMessage():
      role = USER if message.role == "user" else SYSTEM
      yield from _turn(role, message.name or message.role, "".join(message.parts))
    case ToolsMessage():
      raise MessageError(f"{at}.tools", "Kimi-Linear's format declares tools before the conversation only")


def answer(message: AssistantMessage, ids: list[str]) -> Iterator[Segment]:
  """Yields what the model generates for a message: all that follows the generation prompt.

  Args:
    message: the answer.
    ids: id of each of its calls.
  """
  yield Segment("".join(message.parts))
  if message.tool_calls:
    yield Segment(SECTION_BEGIN, is_marker=True)
    for call, call_id in zip(message.tool_calls, ids):
      yield from (Segment(CALL_BEGIN, is_marker=True), Segment(call_id))
      yield from (Segment(ARGUMENTS_BEGIN, is_marker=True), Segment(call.arguments.strip() or "{}"))
      yield Segment(CALL_END, is_marker=True)
    yield Segment(SECTION_END, is_marker=True)
  yield Segment(END, is_marker=True)


def _head(role: str, name: str) -> Iterator[Segment]:
  yield from (Segment(role, is_marker=True), Segment(name), Segment(MIDDLE, is_marker=True))


def _turn(role: str, name: str, text: str) -> Iterator[Segment]:
  yield from _head(role, name)
  yield from (Segment(text), Segment(END, is_marker=True))
