"""What a parser reads: text and markers in turn, out of token ids or out of text.

Of ids, a marker is known for certain, and text that merely spells one stays text. Text alone cannot tell the
two apart; it serves for answers that were stored as text.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from MaxText.common.errors import InputError
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.stream import StreamDecoder


class Marker(NamedTuple):
  """A special token that structures an answer."""

  name: str


Piece = str | Marker


class IdPieces:
  """Turns token ids into pieces; other special tokens than the markers are left out."""

  def __init__(self, tokenizer: KimiTokenizer, markers: Iterable[str]):
    """Starts an empty stream.

    Args:
      tokenizer: gives the bytes of each id.
      markers: names of the markers; those that the vocabulary lacks cannot occur.
    """
    self._markers = {}
    for name in markers:
      try:
        self._markers[tokenizer.special_id(name)] = Marker(name)
      except InputError:
        continue
    self._text = StreamDecoder(tokenizer)

  def push(self, token: int) -> list[Piece]:
    """Takes one id and returns what it completes; bytes of an incomplete character wait.

    Raises:
      InputError: the id is not in the vocabulary.
    """
    if token in self._markers:
      return [*self.flush(), self._markers[token]]
    return _non_empty(self._text.push(token))

  def flush(self) -> list[Piece]:
    """Ends the text so far: U+FFFD if it stopped within a character, else nothing."""
    return _non_empty(self._text.flush())


class TextPieces:
  """Turns text that spells its markers into pieces, however it is cut."""

  def __init__(self, markers: Iterable[str]):
    """Starts an empty stream.

    Args:
      markers: names of the markers; none may begin another.
    """
    self._names = tuple(markers)
    self._marker = re.compile("|".join(map(re.escape, self._names)))
    self._held = ""

  def push(self, text: str) -> list[Piece]:
    """Takes some text and returns what is certain; an end that may become a marker waits."""
    text, pieces, start = self._held + text, [], 0
    for found in self._marker.finditer(text):
      pieces += [*_non_empty(text[start : found.start()]), Marker(found[0])]
      start = found.end()
    rest = text[start:]
    longest = max(map(len, self._names)) - 1
    begins = range(max(len(rest) - longest, 0), len(rest))
    cut = next((i for i in begins if any(name.startswith(rest[i:]) for name in self._names)), len(rest))
    self._held = rest[cut:]
    return [*pieces, *_non_empty(rest[:cut])]

  def flush(self) -> list[Piece]:
    """Ends the text: what waited is text after all."""
    rest, self._held = self._held, ""
    return _non_empty(rest)


def _non_empty(text: str) -> list[Piece]:
  return [text] if text else []
