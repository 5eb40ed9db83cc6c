"""What a renderer says, piece by piece, and its token ids.

A segment is either a marker, which is one special id, or text, which is encoded on its own as ordinary text.
Byte pairs never merge across two segments, and no text can become a marker. Ids and the mask of the model's
own tokens come out of one walk, so they cannot disagree.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Encoder(Protocol):
  """The two things that rendering needs of a tokenizer."""

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text` as ordinary text."""

  def special_id(self, name: str) -> int:
    """Returns the id of a special token."""


class Segment(NamedTuple):
  """One piece of a rendered chat.

  Attributes:
    text: ordinary text, or the name of a marker.
    is_marker: whether it is a special token.
    is_output: whether the model itself generates it.
  """

  text: str
  is_marker: bool = False
  is_output: bool = False


@dataclasses.dataclass(frozen=True)
class Rendered:
  """A rendered chat.

  Attributes:
    ids: its tokens.
    is_output: for each token, whether the model itself generates it: the tokens that training must predict.
  """

  ids: list[int]
  is_output: list[bool]


def encode(segments: Iterable[Segment], tokenizer: Encoder) -> Rendered:
  """Encodes each segment on its own.

  Raises:
    InputError: the vocabulary lacks a marker.
  """
  rendered = Rendered([], [])
  for segment in segments:
    ids = [tokenizer.special_id(segment.text)] if segment.is_marker else tokenizer.encode(segment.text)
    rendered.ids.extend(ids)
    rendered.is_output.extend([segment.is_output] * len(ids))
  return rendered


def text_of(segments: Iterable[Segment]) -> str:
  """Returns the chat as text with its markers written out: for people, never to be encoded."""
  return "".join(segment.text for segment in segments)
