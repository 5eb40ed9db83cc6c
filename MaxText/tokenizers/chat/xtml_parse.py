"""Reads an answer in Kimi K3's format while it is generated.

A prompt ends within the first channel, so an answer begins there. Models break the format now and then; the
reader mends what it can and says so:

- a closing marker that is missing is implied by what opens next, and by the end of the answer;
- a call outside `tools`, or text outside the channels, is taken for what it is, and `[EOS]` ends an answer
  too;
- `<|open|>` or `<|close|>` with no element's name behind it is dropped, and what follows is text;
- an element that cannot be used is dropped with its text, and so is what follows the end of the message.

No marker and no element's name becomes content. Whatever the cut of the pieces, the events add up to the
same.

Source: spec section 1.6.
"""

import re

from MaxText.tokenizers.chat.call_events import OpenCall
from MaxText.tokenizers.chat.events import (
  ContentDelta,
  Event,
  Finish,
  Problem,
  ReasoningDelta,
  ToolCallEnd,
)
from MaxText.tokenizers.chat.pieces import Marker, Piece
from MaxText.tokenizers.chat.xtml_render import CLOSE, END, OPEN, SEP

EOS = "[EOS]"
MARKERS = (OPEN, CLOSE, SEP, END, EOS)

_PARENTS = {
  "think": "message",
  "response": "message",
  "tools": "message",
  "call": "tools",
  "argument": "call",
  "json": "call",
}
_TAGS = ("message", *_PARENTS)
_OPENING = re.compile(rf'({"|".join(_TAGS)})((?: \w+="[^"]*")*) ?')
_ATTRIBUTE = re.compile(r' (\w+)="([^"]*)"')


class XtmlParser:
  """Reads the pieces of one answer."""

  def __init__(self, *, thinking: bool):
    """Starts within the channel that the prompt opened.

    Args:
      thinking: whether that is `think`; else it is `response`.
    """
    self._open = ["message", "think" if thinking else "response"]
    self._events: list[Event] = []
    self._marker: str | None = None  # <|open|> or <|close|>, while its <|sep|> is awaited
    self._header = ""
    self._calls = 0
    self._whole_calls = 0
    self._call: OpenCall | None = None
    self._takes_text = False  # whether the argument or JSON text that is open is used
    self._text_seen = False  # since the last marker
    self._is_begun = False
    self._is_ended = False

  def push(self, piece: Piece) -> list[Event]:
    """Takes the next piece and returns what it tells."""
    if self._is_ended:
      self._after_end(piece)
    elif not isinstance(piece, Marker):
      self._read_text(piece)
    elif piece.name in (OPEN, CLOSE):
      self._end_header(is_closed=False)
      self._marker, self._header = piece.name, ""
    elif piece.name == SEP:
      self._end_header(is_closed=True)
    else:
      self._end_header(is_closed=False)
      self._end_answer(is_cut_off=False)
    return self._told()

  def end(self, is_cut_off: bool) -> list[Event]:
    """Ends the answer and returns what remains to be told.

    Args:
      is_cut_off: the model was stopped before it ended by itself.
    """
    if not self._is_ended:
      if self._marker:
        self._say("the answer stops within a marker")
      self._end_answer(is_cut_off)
      reason = "length" if is_cut_off else "stop"
    else:
      reason = "stop"
    return [*self._told(), Finish("tool_calls" if reason == "stop" and self._whole_calls else reason)]

  def _told(self) -> list[Event]:
    told, self._events = self._events, []
    self._is_begun = self._is_begun or bool(told)
    self._whole_calls += sum(isinstance(event, ToolCallEnd) and event.is_complete for event in told)
    return told

  def _say(self, problem: str) -> None:
    self._events.append(Problem(problem))

  # --- markers ---------------------------------------------------------------------------------------------

  def _end_header(self, *, is_closed: bool) -> None:
    """Ends the name behind a marker: at its `<|sep|>`, or where another marker stands in its place."""
    marker, header, self._marker = self._marker, self._header, None
    self._text_seen = False
    if marker is None:
      if is_closed:
        self._say(f"{SEP} without a marker before it is dropped")
      return
    opening = _OPENING.fullmatch(header) if marker == OPEN else None
    if opening is None and not (marker == CLOSE and header.rstrip() in _TAGS):
      self._say(f"{marker}{header[:60]} is no element and dropped")
      return
    if not is_closed:
      self._say(f"{SEP} is missing behind {marker}{header[:60]}")
    if marker == CLOSE:
      self._close(header.rstrip())
    else:
      attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(opening[2])}
      self._open_element(opening[1], attributes)

  def _open_element(self, tag: str, attributes: dict[str, str]) -> None:
    if tag == "message":
      self._open_message()
      return
    if tag == self._open[-1] and tag in ("think", "response"):
      if self._is_begun:
        self._say(f"{OPEN}{tag} is open already")
      return
    parent = _PARENTS[tag]
    if parent not in self._open:
      self._say(f"{OPEN}{tag} outside {parent}")
      if tag == "call":
        self._open_element("tools", {})
    while parent in self._open and self._open[-1] != parent:
      self._leave(is_implied=True)
    self._open.append(tag)
    if tag == "call":
      self._begin_call(attributes)
    elif tag in ("argument", "json"):
      self._begin_arguments(tag, attributes)

  def _open_message(self) -> None:
    """Takes the head of a message where a whole one is read; a second one ends the answer."""
    if self._is_begun:
      self._say("another message begins, the answer ends")
      self._end_answer(is_cut_off=False)
    else:
      self._open, self._is_begun = ["message"], True

  def _close(self, tag: str) -> None:
    if tag not in self._open:
      self._say(f"{CLOSE}{tag} closes nothing")
      return
    while self._open[-1] != tag:
      self._leave(is_implied=True)
    self._leave(is_implied=False)
    self._is_ended = not self._open

  def _leave(self, *, is_implied: bool) -> None:
    """Closes the innermost element."""
    tag = self._open.pop()
    if is_implied:
      self._say(f"{CLOSE}{tag} is missing")
    if tag == "argument" and self._takes_text:
      self._events += self._call.end_argument()
    elif tag == "call" and self._call:
      self._events += self._call.end()
      self._call = None
    self._takes_text = False

  # --- calls -----------------------------------------------------------------------------------------------

  def _begin_call(self, attributes: dict[str, str]) -> None:
    if not attributes.get("tool"):
      self._say("a call without a tool is dropped")
      return
    self._call = OpenCall(self._calls)
    self._calls += 1
    self._events += self._call.start(attributes["tool"])

  def _begin_arguments(self, tag: str, attributes: dict[str, str]) -> None:
    if self._call is None:
      return
    if tag == "json":
      begun = [] if self._call.begin_raw() else None
    elif "key" in attributes:
      begun = self._call.begin_argument(attributes["key"], attributes.get("type", "string"))
    else:
      begun = None
    if begun is None:
      self._say(f"{OPEN}{tag} with no new key is dropped")
    else:
      self._events += begun
      self._takes_text = True

  # --- text ------------------------------------------------------------------------------------------------

  def _read_text(self, text: str) -> None:
    if self._marker is None:
      self._take(text)
      return
    self._header += text
    if not _may_become_header(self._marker, self._header):
      self._say(f"{self._marker} with no element behind it is dropped")
      text, self._marker = self._header, None
      self._take(text)

  def _take(self, text: str) -> None:
    """Takes text as part of the innermost element."""
    match self._open[-1]:
      case "think":
        self._events.append(ReasoningDelta(text))
      case "response":
        self._events.append(ContentDelta(text))
      case "message":
        self._take_between(text)
      case "argument" if self._takes_text:
        self._events += self._call.argument_text(text)
      case "json" if self._takes_text:
        self._events += self._call.raw_text(text)
      case tag if self._is_first_text(text):
        self._say(f"text within {tag} is dropped")

  def _take_between(self, text: str) -> None:
    """Takes text between channels for content, but for the spaces before it."""
    if self._is_first_text(text):
      self._say("text outside the channels is taken as the response")
      text = text.lstrip()
    if self._text_seen:
      self._events.append(ContentDelta(text))

  def _is_first_text(self, text: str) -> bool:
    """Whether this is the first text since a marker that is more than spaces."""
    is_first = not self._text_seen and not text.isspace()
    self._text_seen = self._text_seen or is_first
    return is_first

  # --- end -------------------------------------------------------------------------------------------------

  def _end_answer(self, is_cut_off: bool) -> None:
    """Closes what is open: a call is whole only if the model ended by itself and between its arguments."""
    is_within = self._call is not None and (is_cut_off or self._open[-1] in ("argument", "json"))
    if is_within:
      self._events += self._call.abandon()
      self._call, self._takes_text = None, False
      self._open = ["message"]
    while self._open:
      tag = self._open[-1]
      if is_cut_off or tag == "message":
        self._open.pop()
      else:
        self._leave(is_implied=True)
    self._marker, self._text_seen, self._is_ended = None, False, True

  def _after_end(self, piece: Piece) -> None:
    is_end = isinstance(piece, Marker) and piece.name in (END, EOS)
    if not is_end and self._is_first_text("x" if isinstance(piece, Marker) else piece):
      self._say("what follows the end of the message is dropped")


def _may_become_header(marker: str, text: str) -> bool:
  """Whether `text` behind a marker can still grow into an element's name; what cannot, never can again."""
  if marker == CLOSE:
    return any(tag.startswith(text.rstrip()) for tag in _TAGS)
  name, space, _ = text.partition(" ")
  return name in _TAGS if space else any(tag.startswith(name) for tag in _TAGS)


def _unescape(value: str) -> str:
  return value.replace("&quot;", '"').replace("&amp;", "&")
