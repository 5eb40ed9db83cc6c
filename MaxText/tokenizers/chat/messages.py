"""Chat messages as OpenAI's interface has them, checked once, so that a renderer meets no surprise.

A mistake is one line that names its place: `messages[2].tool_calls[0].function: no key 'name'`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from MaxText.common.errors import InputError, did_you_mean
from MaxText.tokenizers.chat import json_text


class MessageError(InputError):
  """A message, tool or option of a chat that cannot be used.

  Attributes:
    param: where it stands, such as `messages[2].content`.
  """

  def __init__(self, param: str, fault: str):
    super().__init__(f"{param}: {fault}")
    self.param = param


@dataclasses.dataclass(frozen=True)
class TextMessage:
  """What the system or the user says.

  Attributes:
    role: who speaks.
    parts: the text, in the parts in which it was sent; each is encoded on its own.
    name: who of several users or systems.
  """

  role: Literal["system", "user"]
  parts: tuple[str, ...]
  name: str | None = None


@dataclasses.dataclass(frozen=True)
class ToolsMessage:
  """A system message that declares more tools in the middle of a conversation."""

  tools: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """One call of an assistant message.

  Attributes:
    name: the function.
    arguments: JSON of its arguments, or whatever the model wrote in its place.
    id: what a result refers to.
  """

  name: str
  arguments: str
  id: str | None = None


@dataclasses.dataclass(frozen=True)
class AssistantMessage:
  """What the model said.

  Attributes:
    parts: the visible answer.
    reasoning: what it thought before.
    tool_calls: what it asked for.
    name: which of several assistants.
    weight: 1, or 0 for an answer that training must not imitate.
  """

  parts: tuple[str, ...]
  reasoning: str = ""
  tool_calls: tuple[ToolCall, ...] = ()
  name: str | None = None
  weight: int = 1


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """What a called function gave back.

  Attributes:
    parts: the result.
    call: which call of the last assistant message it answers, counted from 0.
    name: the function's name, if the message repeats it.
  """

  parts: tuple[str, ...]
  call: int
  name: str | None = None


Message = TextMessage | ToolsMessage | AssistantMessage | ToolResult


@dataclasses.dataclass(frozen=True)
class Conversation:
  """Checked messages, and the tools that are declared before the first of them."""

  messages: tuple[Message, ...]
  tools: tuple[Mapping[str, Any], ...] = ()

  @property
  def has_tools(self) -> bool:
    """Whether any tool is declared, at the beginning or later."""
    return bool(self.tools) or any(isinstance(message, ToolsMessage) for message in self.messages)


# keys of each role; those that OpenAI's client sends back with nothing in them are accepted while they are
# empty
_KEYS = {
  "system": {"role", "content", "name", "tools"},
  "user": {"role", "content", "name"},
  "assistant": {"role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "weight"},
  "tool": {"role", "content", "name", "tool_call_id"},
}
_EMPTY_KEYS = {"refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content"}
_MEDIA = ("image", "video", "audio", "file")


def read_conversation(messages: Any, tools: Any = None) -> Conversation:
  """Checks the messages and tools of a request or of a line of training data.

  Args:
    messages: list of objects with `role` (system, developer, user, assistant, tool) and `content`, a text or
      a list of text parts. An assistant may have `reasoning_content` and `tool_calls`; a tool result names
      its call by `tool_call_id`, and may leave it out where the calls have no ids: then results are in the
      order of the calls.
    tools: list of functions, or None.

  Returns:
    The conversation, in the order given.

  Raises:
    MessageError: something is missing, unknown, of the wrong type, or refers to nothing.
  """
  if not isinstance(messages, list | tuple):
    raise MessageError("messages", f"expected a list, got {_kind(messages)}")
  if not messages:
    raise MessageError("messages", "expected at least one message, got none")
  reader = _Reader()
  return Conversation(
    tuple(reader.message(entry, f"messages[{i}]") for i, entry in enumerate(messages)), _tools(tools, "tools")
  )


class _Reader:
  """Reads message after message and remembers which calls a result may answer."""

  def __init__(self):
    self._calls: tuple[ToolCall, ...] | None = None
    self._answered: list[int] = []

  def message(self, entry: Any, at: str) -> Message:
    if not isinstance(entry, Mapping):
      raise MessageError(at, f"expected an object, got {_kind(entry)}")
    role = _role(entry, at)
    _check_keys(entry, _KEYS[role], at)
    if role == "assistant":
      message = _assistant(entry, at)
      self._calls, self._answered = message.tool_calls, []
      return message
    if role == "tool":
      return self._result(entry, at)
    if entry.get("tools"):
      if entry.get("content"):
        raise MessageError(f"{at}.tools", "expected either tools or content in one message, got both")
      return ToolsMessage(_tools(entry["tools"], f"{at}.tools"))
    return TextMessage(role, _parts(entry, at), _optional_text(entry, "name", at))

  def _result(self, entry: Mapping[str, Any], at: str) -> ToolResult:
    if not self._calls:
      raise MessageError(at, "a tool result, but the last assistant message before it has no tool_calls")
    call = self._answered_call(_optional_text(entry, "tool_call_id", at), at)
    if call in self._answered:
      raise MessageError(f"{at}.tool_call_id", f"call {self._calls[call].id!r} has a result already")
    self._answered.append(call)
    return ToolResult(_parts(entry, at), call, _optional_text(entry, "name", at))

  def _answered_call(self, call_id: str | None, at: str) -> int:
    ids = [call.id for call in self._calls]
    if call_id in ids and call_id is not None:
      return ids.index(call_id)
    known = [known for known in ids if known is not None]
    if call_id is None and not known and len(self._answered) < len(ids):
      return len(self._answered)
    wanted = f"one of {', '.join(map(repr, known))}" if known else f"{len(ids)} results without ids, in order"
    hint = did_you_mean(call_id, known) if call_id else ""
    raise MessageError(f"{at}.tool_call_id", f"expected {wanted}, got {call_id!r}{hint}")


def _kind(value: Any) -> str:
  return "null" if value is None else type(value).__name__


def _role(entry: Mapping[str, Any], at: str) -> str:
  if "role" not in entry:
    raise MessageError(at, f"no key 'role'{_near('role', entry)}")
  role = entry["role"]
  if role == "developer":  # OpenAI's newer name of the same thing
    return "system"
  if role == "function":
    raise MessageError(f"{at}.role", "'function' is of the old interface, use 'tool' with tool_call_id")
  if not isinstance(role, str) or role not in _KEYS:
    hint = did_you_mean(role, _KEYS) if isinstance(role, str) else ""
    raise MessageError(f"{at}.role", f"expected one of {', '.join(_KEYS)}, got {role!r}{hint}")
  return role


def _near(wanted: str, entry: Mapping[str, Any]) -> str:
  close = did_you_mean(wanted, (key for key in entry if isinstance(key, str)))
  return close.replace("did you mean", "but there is").rstrip("?")


def _check_keys(entry: Mapping[str, Any], known: Iterable[str], at: str) -> None:
  for key in entry:
    if key in known or (key in _EMPTY_KEYS and not entry[key]):
      continue
    if key == "function_call":
      raise MessageError(f"{at}.function_call", "of the old interface, use tool_calls")
    raise MessageError(f"{at}.{key}", f"unknown key{did_you_mean(str(key), known)}")


def _optional_text(entry: Mapping[str, Any], key: str, at: str) -> str | None:
  value = entry.get(key)
  if value is None or isinstance(value, str):
    return value or None
  raise MessageError(f"{at}.{key}", f"expected a text, got {_kind(value)}")


def _needed_text(entry: Mapping[str, Any], key: str, at: str) -> str:
  if key not in entry:
    raise MessageError(at, f"no key {key!r}{_near(key, entry)}")
  value = entry[key]
  if not isinstance(value, str):
    raise MessageError(f"{at}.{key}", f"expected a text, got {_kind(value)}")
  return value


def _parts(entry: Mapping[str, Any], at: str) -> tuple[str, ...]:
  if "content" not in entry:
    raise MessageError(at, f"no key 'content'{_near('content', entry)}")
  content, at = entry["content"], f"{at}.content"
  if isinstance(content, str):
    return (content,)
  if not isinstance(content, list | tuple):
    raise MessageError(at, f"expected a text or a list of text parts, got {_kind(content)}")
  return tuple(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
  if not isinstance(part, Mapping):
    raise MessageError(at, f"expected an object, got {_kind(part)}")
  kind = part.get("type")
  if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
    raise MessageError(
      at, f"{kind!r} cannot be read: only text is supported, no images, audio, video or files"
    )
  if kind != "text":
    raise MessageError(f"{at}.type", f"expected 'text', got {kind!r}")
  return _needed_text(part, "text", at)


def _assistant(entry: Mapping[str, Any], at: str) -> AssistantMessage:
  calls = _tool_calls(entry.get("tool_calls"), f"{at}.tool_calls")
  reasoning = _optional_text(entry, "reasoning_content", at) or _optional_text(entry, "reasoning", at) or ""
  if entry.get("content") is not None:
    parts = _parts(entry, at)
  elif calls or reasoning:
    parts = ()
  else:
    raise MessageError(at, "an assistant message needs content or tool_calls" + _near("content", entry))
  weight = entry.get("weight", 1)
  if weight not in (0, 1):
    raise MessageError(f"{at}.weight", f"expected 0 or 1, got {weight!r}")
  return AssistantMessage(parts, reasoning, calls, _optional_text(entry, "name", at), int(weight))


def _tool_calls(entries: Any, at: str) -> tuple[ToolCall, ...]:
  if entries is None:
    return ()
  if not isinstance(entries, list | tuple):
    raise MessageError(at, f"expected a list, got {_kind(entries)}")
  calls = tuple(_tool_call(entry, f"{at}[{i}]") for i, entry in enumerate(entries))
  seen: set[str] = set()
  for i, call in enumerate(calls):
    if call.id in seen:
      raise MessageError(f"{at}[{i}].id", f"{call.id!r} is the id of an earlier call of this message")
    seen.update(filter(None, [call.id]))
  return calls


def _tool_call(entry: Any, at: str) -> ToolCall:
  if not isinstance(entry, Mapping):
    raise MessageError(at, f"expected an object, got {_kind(entry)}")
  _check_keys(entry, ("id", "type", "function", "index"), at)
  _check_function(entry, at)
  function, inside = entry["function"], f"{at}.function"
  _check_keys(function, ("name", "arguments"), inside)
  name = _needed_text(function, "name", inside)
  if not name:
    raise MessageError(f"{inside}.name", "expected a function's name, got an empty text")
  arguments = function.get("arguments")
  if isinstance(arguments, Mapping):  # not OpenAI's form, but common in training data
    arguments = json_text.spaced(arguments)
  elif not isinstance(arguments, str | None):
    raise MessageError(f"{inside}.arguments", f"expected JSON in a text, got {_kind(arguments)}")
  return ToolCall(name, arguments or "", _optional_text(entry, "id", at))


def _check_function(entry: Mapping[str, Any], at: str) -> None:
  if entry.get("type", "function") != "function":
    raise MessageError(f"{at}.type", f"expected 'function', got {entry['type']!r}")
  if "function" not in entry:
    raise MessageError(at, f"no key 'function'{_near('function', entry)}")
  if not isinstance(entry["function"], Mapping):
    raise MessageError(f"{at}.function", f"expected an object, got {_kind(entry['function'])}")


def _tools(entries: Any, at: str) -> tuple[Mapping[str, Any], ...]:
  if entries is None:
    return ()
  if not isinstance(entries, Sequence) or isinstance(entries, str):
    raise MessageError(at, f"expected a list, got {_kind(entries)}")
  names: set[str] = set()
  for i, entry in enumerate(entries):
    name = _tool_name(entry, f"{at}[{i}]")
    if name in names:
      raise MessageError(f"{at}[{i}].function.name", f"{name!r} is declared twice")
    names.add(name)
  return tuple(entries)


def _tool_name(entry: Any, at: str) -> str:
  if not isinstance(entry, Mapping):
    raise MessageError(at, f"expected an object, got {_kind(entry)}")
  _check_function(entry, at)
  function, inside = entry["function"], f"{at}.function"
  _check_keys(function, ("name", "description", "parameters", "strict"), inside)
  name = _needed_text(function, "name", inside)
  if not name:
    raise MessageError(f"{inside}.name", "expected a function's name, got an empty text")
  parameters = function.get("parameters")
  if not isinstance(parameters, Mapping | None):
    raise MessageError(f"{inside}.parameters", f"expected a JSON schema, got {_kind(parameters)}")
  return name
