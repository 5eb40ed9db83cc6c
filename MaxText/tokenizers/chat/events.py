"""What a parser tells about an answer while it is generated, and the answer that this adds up to.

However the answer is cut, the events add up to the same; deltas only come in other portions.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from MaxText.tokenizers.chat.messages import AssistantMessage, ToolCall
from MaxText.tokenizers.chat.pieces import IdPieces, Piece, TextPieces


@dataclasses.dataclass(frozen=True)
class ReasoningDelta:
  """More of what the model thinks."""

  text: str


@dataclasses.dataclass(frozen=True)
class ContentDelta:
  """More of the visible answer."""

  text: str


@dataclasses.dataclass(frozen=True)
class ToolCallStart:
  """A call begins.

  Attributes:
    index: number of the call in this answer, from 0.
    name: the function.
    id: the id that the model gave, where the format has one.
  """

  index: int
  name: str
  id: str | None = None


@dataclasses.dataclass(frozen=True)
class ArgumentsDelta:
  """More of the JSON text of a call's arguments."""

  index: int
  text: str


@dataclasses.dataclass(frozen=True)
class ToolCallEnd:
  """A call ends.

  Attributes:
    index: number of the call.
    is_complete: False where the answer stopped within the call; its arguments are then no JSON, so that
      nobody runs half of a command.
  """

  index: int
  is_complete: bool


@dataclasses.dataclass(frozen=True)
class Problem:
  """The answer broke its format; what was made of it is said."""

  text: str


@dataclasses.dataclass(frozen=True)
class Finish:
  """The answer ends, for the reason that OpenAI's interface gives it."""

  reason: Literal["stop", "tool_calls", "length"]


Event = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd | Problem | Finish


class Parser(Protocol):
  """Reads the pieces of one answer."""

  def push(self, piece: Piece) -> list[Event]:
    """Takes the next piece and returns what it tells."""

  def end(self, is_cut_off: bool) -> list[Event]:
    """Ends the answer and returns what remains to be told, `Finish` last."""


class AnswerStream:
  """A parser with what it reads from: token ids, or text that spells its markers."""

  def __init__(self, pieces: IdPieces | TextPieces, parser: Parser):
    """Takes ids if `pieces` are an `IdPieces`, else text."""
    self._pieces = pieces
    self._parser = parser

  def push(self, item: int | str) -> list[Event]:
    """Takes one id, or some text, and returns what it tells."""
    return self._parse(self._pieces.push(item))

  def end(self, *, is_cut_off: bool) -> list[Event]:
    """Ends the answer.

    Args:
      is_cut_off: the model was stopped before it ended by itself.

    Returns:
      What remains to be told, `Finish` last.
    """
    return self._parse(self._pieces.flush()) + self._parser.end(is_cut_off)

  def _parse(self, pieces: Iterable[Piece]) -> list[Event]:
    return [event for piece in pieces for event in self._parser.push(piece)]


@dataclasses.dataclass(frozen=True)
class Answer:
  """A whole answer.

  Attributes:
    reasoning: what the model thought.
    content: the visible answer.
    tool_calls: what it asked for; the arguments of an incomplete call are no JSON.
    incomplete: numbers of the calls within which the answer stopped.
    problems: how it broke its format.
    finish_reason: why it ended; None while it goes on.
  """

  reasoning: str
  content: str
  tool_calls: tuple[ToolCall, ...]
  incomplete: frozenset[int]
  problems: tuple[str, ...]
  finish_reason: Literal["stop", "tool_calls", "length"] | None

  def message(self) -> AssistantMessage:
    """Returns the answer as a message of the conversation that goes on."""
    return AssistantMessage((self.content,), self.reasoning, tuple(self.tool_calls))

  def openai(self, call_id: Callable[[int], str] = "call_{}".format) -> dict[str, Any]:
    """Returns the message as OpenAI's interface has it.

    Args:
      call_id: gives the id of a call by its number, where the model gave none.
    """
    message = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
    if self.reasoning:
      message["reasoning_content"] = self.reasoning
    if self.tool_calls:
      message["tool_calls"] = [
        {
          "id": call.id or call_id(index),
          "type": "function",
          "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(self.tool_calls)
      ]
    return message


class AnswerBuilder:
  """Adds events up to an answer."""

  def __init__(self):
    """Starts with nothing."""
    self._reasoning: list[str] = []
    self._content: list[str] = []
    self._calls: list[tuple[ToolCallStart, list[str]]] = []
    self._incomplete: set[int] = set()
    self._problems: list[str] = []
    self._reason = None

  def add(self, event: Event) -> None:
    """Adds what one event tells."""
    match event:
      case ReasoningDelta(text):
        self._reasoning.append(text)
      case ContentDelta(text):
        self._content.append(text)
      case ToolCallStart():
        self._calls.append((event, []))
      case ArgumentsDelta(index, text):
        self._calls[index][1].append(text)
      case ToolCallEnd(index, is_complete) if not is_complete:
        self._incomplete.add(index)
      case Problem(text):
        self._problems.append(text)
      case Finish(reason):
        self._reason = reason

  def answer(self) -> Answer:
    """Returns the answer so far."""
    return Answer(
      "".join(self._reasoning),
      "".join(self._content),
      tuple(ToolCall(start.name, "".join(arguments), start.id) for start, arguments in self._calls),
      frozenset(self._incomplete),
      tuple(self._problems),
      self._reason,
    )


def answer_of(events: Iterable[Event]) -> Answer:
  """Returns the answer that the events add up to."""
  builder = AnswerBuilder()
  for event in events:
    builder.add(event)
  return builder.answer()
