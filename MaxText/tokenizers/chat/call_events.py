"""The calls of one answer, told as OpenAI's interface streams them: arguments as growing JSON text."""

import json

from MaxText.tokenizers.chat import json_text
from MaxText.tokenizers.chat.events import ArgumentsDelta, Event, Problem, ToolCallEnd, ToolCallStart


class OpenCall:
  """One call while it is generated.

  Its arguments come either key by key or as one JSON text. They are told as they come, except values that
  must first prove to be JSON.
  """

  def __init__(self, index: int):
    """Starts call number `index` of the answer; `start` tells so."""
    self._index = index
    self._keys: set[str] = set()
    self._type = "string"
    self._value: list[str] = []
    self._raw: list[str] | None = None

  def start(self, name: str, call_id: str | None = None) -> list[Event]:
    """Tells that the call begins."""
    return [ToolCallStart(self._index, name, call_id)]

  def begin_argument(self, key: str, declared: str) -> list[Event] | None:
    """Begins the value of `key`, of a type that JSON Schema knows; None if the call cannot take it."""
    if self._raw is not None or key in self._keys:
      return None
    lead = ", " if self._keys else "{"
    self._keys.add(key)
    self._type, self._value = declared, []
    return self._delta(f"{lead}{json_text.spaced(key)}: " + '"' * (declared == "string"))

  def argument_text(self, text: str) -> list[Event]:
    """Takes more of the value that was begun last."""
    if self._type == "string":
      return self._delta(json_text.spaced(text)[1:-1])
    self._value.append(text)
    return []

  def end_argument(self) -> list[Event]:
    """Ends the value that was begun last; one that is no JSON becomes a string, and another type is said."""
    if self._type == "string":
      return self._delta('"')
    text = "".join(self._value)
    try:
      found = json_text.type_name(json_text.read(text))
    except ValueError:
      fault = f"argument declared {self._type} is no JSON and taken as a string: {text[:60]!r}"
      return [*self._delta(json_text.spaced(text)), Problem(fault)]
    problems = [Problem(f"argument declared {self._type} is {found}")] if found != self._type else []
    return [*self._delta(text), *problems]

  def begin_raw(self) -> bool:
    """Begins arguments that are one JSON text; False if the call has arguments already."""
    if self._raw is not None or self._keys:
      return False
    self._raw = []
    return True

  def raw_text(self, text: str) -> list[Event]:
    """Takes more of the JSON text; spaces before it are left out."""
    text = text if self._raw else text.lstrip()
    if not text:
      return []
    self._raw.append(text)
    return self._delta(text)

  def end(self) -> list[Event]:
    """Ends the call as a whole one; what is no JSON object is said."""
    if self._raw:
      fault = _fault_of("".join(self._raw))
      problems = [Problem(f"the arguments of a tool call are {fault}")] if fault else []
      return [*problems, ToolCallEnd(self._index, is_complete=True)]
    return [*self._delta("}" if self._keys else "{}"), ToolCallEnd(self._index, is_complete=True)]

  def abandon(self) -> list[Event]:
    """Ends the call where the answer stopped within it; it is whole only if its JSON text is."""
    is_complete = bool(self._raw) and _fault_of("".join(self._raw)) is None
    return [Problem("the answer stops within a tool call"), ToolCallEnd(self._index, is_complete)]

  def _delta(self, text: str) -> list[Event]:
    return [ArgumentsDelta(self._index, text)]


def _fault_of(text: str) -> str | None:
  """Says why `text` is not a JSON object; None if it is one."""
  try:
    found = json_text.type_name(json_text.read(text))
  except json.JSONDecodeError as error:
    return f"no JSON: {error.msg} at character {error.pos}"
  except ValueError as error:
    return f"no JSON: {error}"
  return None if found == "object" else f"of type {found}, not an object"
