"""Readers of answers for the scheduler: tokens to text, or to the events of a chat, up to a stop string.

A stop string may begin in one token and end in another, so whatever may become one is held back. Where an
answer is cut does not depend on how its tokens cut the text.
"""

from collections.abc import Collection, Sequence

from MaxText.inference.serving import Reason
from MaxText.tokenizers.chat.events import AnswerStream, ContentDelta, Event, Finish
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.stream import StreamDecoder


class StopStrings:
  """Lets text through until one of some strings has come up; neither it nor what follows gets through.

  Attributes:
    is_stopped: one has come up.
  """

  def __init__(self, strings: Sequence[str]):
    """Takes strings of at least one character each."""
    self._strings = tuple(strings)
    self._held = ""
    self.is_stopped = False

  def push(self, text: str) -> str:
    """Takes some text and returns what is certain to be no part of a stop string."""
    if self.is_stopped:
      return ""
    text = self._held + text
    found = [(at + len(stop), at) for stop in self._strings if (at := text.find(stop)) >= 0]
    if found:
      self.is_stopped, self._held = True, ""
      return text[: min(found)[1]]  # the one that is whole first: then the cut of the pieces cannot matter
    held = max((_overlap(text, stop) for stop in self._strings), default=0)
    self._held = text[len(text) - held :]
    return text[: len(text) - held]

  def flush(self) -> str:
    """Ends the text: what was held back is text after all."""
    rest, self._held = self._held, ""
    return rest


def _overlap(text: str, stop: str) -> int:
  """Characters at the end of `text` with which `stop` may begin."""
  longest = min(len(stop) - 1, len(text))
  return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class TextReader:
  """Reads an answer as plain text; its pieces are strings."""

  def __init__(self, tokenizer: KimiTokenizer, stop_ids: Collection[int], stop: Sequence[str] = ()):
    """Starts an empty answer.

    Args:
      tokenizer: gives the bytes of each id.
      stop_ids: ids that end the answer and are no part of its text.
      stop: strings that end it.
    """
    self._decoder = StreamDecoder(tokenizer)
    self._stop_ids = frozenset(stop_ids)
    self._stops = StopStrings(stop)

  @property
  def is_stopped(self) -> bool:
    """Whether a stop string came up."""
    return self._stops.is_stopped

  def push(self, token: int) -> list[str]:
    """Takes one token and returns the text that is certain."""
    return [] if token in self._stop_ids else _non_empty(self._stops.push(self._decoder.push(token)))

  def end(self, reason: Reason) -> list[str]:
    """Ends the answer and returns the rest of its text."""
    if self.is_stopped:
      return []
    return _non_empty(self._stops.push(self._decoder.flush()) + self._stops.flush())


class ChatReader:
  """Reads an answer of a chat; its pieces are the events of `tokenizers.chat.events`.

  Stop strings count in the visible answer only: not in what the model thinks, not in a tool's arguments.
  """

  def __init__(self, stream: AnswerStream, stop: Sequence[str] = (), hidden: Collection[int] = ()):
    """Starts an empty answer.

    Args:
      stream: the chat format's own reader.
      stop: strings that end the answer.
      hidden: stop ids that are ordinary tokens, and no part of the answer.
    """
    self._stream = stream
    self._stops = StopStrings(stop)
    self._hidden = frozenset(hidden)

  @property
  def is_stopped(self) -> bool:
    """Whether a stop string came up."""
    return self._stops.is_stopped

  def push(self, token: int) -> list[Event]:
    """Takes one token and returns what is certain of what it tells."""
    return [] if token in self._hidden else self._filtered(self._stream.push(token))

  def end(self, reason: Reason) -> list[Event]:
    """Ends the answer and returns what remains to be told, `Finish` last."""
    is_stopped = self.is_stopped
    events = self._stream.end(is_cut_off=is_stopped or reason != "stop")
    if is_stopped:
      return [Finish("stop")]
    *told, finish = self._filtered(events)
    return [*told, *self._rest(), finish]

  def _filtered(self, events: Sequence[Event]) -> list[Event]:
    passed = []
    for event in events:
      if self.is_stopped:
        break
      if isinstance(event, ContentDelta):
        text = self._stops.push(event.text)
        passed += [ContentDelta(text)] if text else []
      else:
        passed += [event] if isinstance(event, Finish) else [*self._rest(), event]
    return passed

  def _rest(self) -> list[Event]:
    """What was held back, when something else than text follows it."""
    text = self._stops.flush()
    return [ContentDelta(text)] if text else []


def _non_empty(text: str) -> list[str]:
  return [text] if text else []
