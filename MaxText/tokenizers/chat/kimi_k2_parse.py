"""Reads an answer in Kimi-Linear's format, which is that of Kimi K2, while it is generated.

Text before the section of calls is the answer. A marker that is missing is implied by the next one and by the
end; a call without a name is dropped, and so is text between calls; all of it is said. No marker becomes
content.
"""

from MaxText.tokenizers.chat.call_events import OpenCall
from MaxText.tokenizers.chat.events import ContentDelta, Event, Finish, Problem, ToolCallEnd
from MaxText.tokenizers.chat.kimi_k2_render import (
  ARGUMENTS_BEGIN,
  CALL_BEGIN,
  CALL_END,
  END,
  SECTION_BEGIN,
  SECTION_END,
)
from MaxText.tokenizers.chat.kimi_k2_render import MARKERS as RENDERED
from MaxText.tokenizers.chat.pieces import Marker, Piece

ENDS = (END, "[EOS]", "[EOT]")
MARKERS = tuple(dict.fromkeys((*RENDERED, *ENDS)))


class KimiK2Parser:
  """Reads the pieces of one answer.

  It is in one of four states: content, section (between calls), header (a call's id), arguments.
  """

  def __init__(self):
    """Starts where the prompt ends: at the answer's text."""
    self._state = "content"
    self._events: list[Event] = []
    self._header: list[str] = []
    self._calls = 0
    self._whole_calls = 0
    self._call: OpenCall | None = None
    self._text_seen = False  # since the last marker
    self._is_ended = False

  def push(self, piece: Piece) -> list[Event]:
    """Takes the next piece and returns what it tells."""
    if self._is_ended:
      self._after_end(piece)
    elif isinstance(piece, Marker):
      self._read_marker(piece.name)
      self._text_seen = False
    else:
      self._read_text(piece)
    return self._told()

  def end(self, is_cut_off: bool) -> list[Event]:
    """Ends the answer and returns what remains to be told.

    Args:
      is_cut_off: the model was stopped before it ended by itself.
    """
    reason = "length" if is_cut_off and not self._is_ended else "stop"
    if not self._is_ended:
      self._end_answer()
    return [*self._told(), Finish("tool_calls" if reason == "stop" and self._whole_calls else reason)]

  def _told(self) -> list[Event]:
    told, self._events = self._events, []
    self._whole_calls += sum(isinstance(event, ToolCallEnd) and event.is_complete for event in told)
    return told

  def _say(self, problem: str) -> None:
    self._events.append(Problem(problem))

  def _read_marker(self, name: str) -> None:
    if name in ENDS:
      self._end_answer()
    elif name == ARGUMENTS_BEGIN and self._state == "header":
      self._begin_call()
      self._state = "arguments"
    elif name in (SECTION_BEGIN, CALL_BEGIN, CALL_END, SECTION_END):
      self._read_structure(name)
    else:
      self._say(f"{name} is dropped")

  def _read_structure(self, name: str) -> None:
    """Reads the markers around calls; whatever is open closes."""
    if self._state == "content" and name != SECTION_BEGIN:
      self._say(f"{name} outside a section of calls")
    if self._state in ("header", "arguments") and name != CALL_END:
      self._say(f"{CALL_END} is missing")
    self._close_call()
    self._state = {SECTION_END: "content", CALL_BEGIN: "header"}.get(name, "section")
    self._header = []

  def _begin_call(self) -> None:
    call_id = "".join(self._header).strip()
    name = _function_of(call_id)
    if not name:
      self._say("a call without a function is dropped")
      return
    self._call = OpenCall(self._calls)
    self._calls += 1
    self._call.begin_raw()
    self._events += self._call.start(name, call_id)

  def _close_call(self) -> None:
    if self._state == "header":
      self._begin_call()  # one without arguments
    if self._call:
      self._events += self._call.end()
    self._call = None

  def _read_text(self, text: str) -> None:
    match self._state:
      case "content":
        self._events.append(ContentDelta(text))
      case "header":
        self._header.append(text)
      case "arguments" if self._call:
        self._events += self._call.raw_text(text)
      case _ if self._is_first_text(text):
        self._say("text between calls is dropped")

  def _is_first_text(self, text: str) -> bool:
    """Whether this is the first text since a marker that is more than spaces."""
    is_first = not self._text_seen and not text.isspace()
    self._text_seen = self._text_seen or is_first
    return is_first

  def _end_answer(self) -> None:
    if self._state == "header":
      self._say("the answer stops within the id of a call, which is dropped")
    if self._call:
      self._events += self._call.abandon()
    self._call, self._text_seen, self._is_ended = None, False, True

  def _after_end(self, piece: Piece) -> None:
    is_end = isinstance(piece, Marker) and piece.name in ENDS
    if not is_end and self._is_first_text("x" if isinstance(piece, Marker) else piece):
      self._say("what follows the end of the message is dropped")


def _function_of(call_id: str) -> str:
  """The function's name in an id `functions.NAME:NUMBER`, of which the model may leave out parts."""
  name, colon, number = call_id.removeprefix("functions.").rpartition(":")
  return name if colon and number.isdecimal() else call_id.removeprefix("functions.")
