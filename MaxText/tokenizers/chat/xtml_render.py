"""Kimi K3's chat format "XTML": a conversation as markers and text.

    <|open|>TAG key="value"<|sep|>BODY<|close|>TAG<|sep|>

A conversation is a row of `message` elements, each followed by `<|end_of_msg|>`. An answer has the channels
`think`, `response` and `tools`, of which the generation prompt opens the first. The walk yields the segments
in which the published encoder cuts the text, because byte pairs do not merge across them.

Source: spec section 1.6. Tool arguments that are objects or arrays are written with spaces, as the published
  encoder
writes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from MaxText.tokenizers.chat import json_text
from MaxText.tokenizers.chat.messages import (
  AssistantMessage,
  Conversation,
  Message,
  TextMessage,
  ToolCall,
  ToolResult,
  ToolsMessage,
)
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.chat.segments import Encoder, Rendered, Segment, encode

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END)

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
_MORE_TOOLS = (
  "## New Tools Available\n"
  "The system dynamically extends the toolset via lazy-loading.\n"
  "You have access to all existing and extended tools.\n"
  "Here are the specs for the extended tools.\n\n```json\n{tools}\n```"
)
_EFFORT = (
  "`thinking_effort` guides on how much to think in your thinking channel "
  "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
  "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICE = {
  "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
  "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
  "The system is invoked with `response_format={type}`.\n"
  "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"


def render(conversation: Conversation, tokenizer: Encoder, options: ChatOptions | None = None) -> Rendered:
  """Returns the token ids of a conversation, and which of them the model itself generates.

  The model's own tokens of an assistant message are all that follow what the generation prompt would be: the
  rest of the message, with the markers that close it.

  Args:
    conversation: checked messages and tools.
    tokenizer: a vocabulary that has the markers.
    options: what the request asks for; None is thinking with full effort and a generation prompt.

  Raises:
    MessageError: the options do not fit the conversation.
    InputError: the vocabulary lacks a marker.
  """
  return encode(segments(conversation, options or ChatOptions()), tokenizer)


def segments(conversation: Conversation, options: ChatOptions) -> Iterator[Segment]:
  """Yields the conversation piece by piece; arguments as `render`."""
  options.check(conversation)
  if conversation.tools:
    yield from _system("tool-declare", _TOOLS.format(tools=json_text.sorted_compact(conversation.tools)))
  if options.thinking and options.thinking_effort:
    yield from _system("thinking-effort", _EFFORT.format(effort=options.thinking_effort))
  yield from _history(conversation.messages, options.thinking)
  if options.tool_choice in _TOOL_CHOICE:
    yield from _system("tool-choice", _TOOL_CHOICE[options.tool_choice])
  if options.response_type != "text":
    yield from _system("response-format", _response_format(options))
  if options.generation_prompt:
    yield from _begin_answer(options.thinking, None)


def _response_format(options: ChatOptions) -> str:
  text = _RESPONSE_FORMAT.format(type=options.response_type)
  if options.response_type == "json_schema":
    schema = options.response_format["json_schema"]["schema"]
    text += _SCHEMA.format(schema=json_text.sorted_compact(schema))
  return text


def _history(messages: Sequence[Message], thinking: bool) -> Iterator[Segment]:
  calls: tuple[ToolCall, ...] = ()
  results = 0
  for message in _in_call_order(messages):
    match message:
      case AssistantMessage():
        calls, results = message.tool_calls, 0
        yield from _begin_answer(thinking, message.name)
        is_output = message.weight > 0
        yield from (segment._replace(is_output=is_output) for segment in answer(message, thinking))
      case ToolResult():
        results += 1
        called = calls[message.call].name
        yield from _message({"role": "tool", "tool": called, "index": str(results)}, message.parts)
      case ToolsMessage():
        yield from _system("tool-declare", _MORE_TOOLS.format(tools=json_text.sorted_compact(message.tools)))
      case TextMessage():
        yield from _message({"role": message.role, "name": message.name}, message.parts)


def _in_call_order(messages: Sequence[Message]) -> Iterator[Message]:
  """Sorts each run of tool results by the calls that they answer."""
  run: list[ToolResult] = []
  for message in messages:
    if isinstance(message, ToolResult):
      run.append(message)
      continue
    yield from sorted(run, key=lambda result: result.call)
    run = []
    yield message
  yield from sorted(run, key=lambda result: result.call)


def _begin_answer(thinking: bool, name: str | None) -> Iterator[Segment]:
  yield from _open("message", {"role": "assistant", "name": name})
  yield from _open("think" if thinking else "response")


def answer(message: AssistantMessage, thinking: bool) -> Iterator[Segment]:
  """Yields what the model generates for a message: all that follows the generation prompt.

  Args:
    message: the answer; without thinking its reasoning is left out.
    thinking: whether the prompt opened the channel `think`; else it opened `response`.
  """
  if thinking:
    if message.reasoning.strip():
      yield Segment(message.reasoning)
    yield from _close("think")
    yield from _open("response")
  yield from map(Segment, message.parts)
  yield from _close("response")
  if message.tool_calls:
    yield from _open("tools")
    for index, call in enumerate(message.tool_calls, start=1):
      yield from _call(call, index)
    yield from _close("tools")
  yield from _close("message")
  yield Segment(END, is_marker=True)


def _call(call: ToolCall, index: int) -> Iterator[Segment]:
  yield from _open("call", {"tool": call.name, "index": str(index)})
  arguments = _arguments(call.arguments)
  if arguments is None:  # kept as the model wrote it
    yield from _element("json", {"type": "object"}, call.arguments)
  else:
    for key, value in arguments.items():
      text = value if isinstance(value, str) else json_text.spaced(value)
      yield from _element("argument", {"key": key, "type": json_text.type_name(value)}, text)
  yield from _close("call")


def _arguments(text: str) -> dict[str, Any] | None:
  if not text.strip():
    return {}
  try:
    value = json_text.read(text)
  except ValueError:
    return None
  return value if isinstance(value, dict) else None


def _system(kind: str, text: str) -> Iterator[Segment]:
  return _message({"role": "system", "type": kind}, (text,))


def _message(attributes: Mapping[str, str | None], parts: Sequence[str]) -> Iterator[Segment]:
  yield from _open("message", attributes)
  yield from map(Segment, parts)
  yield from _close("message")
  yield Segment(END, is_marker=True)


def _element(tag: str, attributes: Mapping[str, str | None], text: str) -> Iterator[Segment]:
  yield from _open(tag, attributes)
  yield Segment(text)
  yield from _close(tag)


def _open(tag: str, attributes: Mapping[str, str | None] | None = None) -> Iterator[Segment]:
  yield Segment(OPEN, is_marker=True)
  yield Segment(tag)
  for key, value in (attributes or {}).items():
    if value is not None:
      yield from (Segment(f" {key}"), Segment('="'), Segment(_escape(value)), Segment('"'))
  yield Segment(SEP, is_marker=True)


def _close(tag: str) -> Iterator[Segment]:
  yield from (Segment(CLOSE, is_marker=True), Segment(tag), Segment(SEP, is_marker=True))


def _escape(value: str) -> str:
  return value.replace("&", "&amp;").replace('"', "&quot;")
