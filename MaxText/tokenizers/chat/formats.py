"""The chat formats, behind one face, and which of them a vocabulary has."""

from typing import Protocol

from MaxText.common.errors import InputError
from MaxText.tokenizers.chat import kimi_k2_parse, kimi_k2_render, xtml_parse, xtml_render
from MaxText.tokenizers.chat.events import AnswerStream
from MaxText.tokenizers.chat.messages import Conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.chat.pieces import IdPieces, TextPieces
from MaxText.tokenizers.chat.segments import Rendered
from MaxText.tokenizers.kimi import KimiTokenizer


class ChatFormat(Protocol):
  """How one model family writes a chat.

  Attributes:
    name: as servers call its parser.
    has_thinking: whether an answer has a channel for it.
  """

  name: str
  has_thinking: bool

  def render(self, conversation: Conversation, options: ChatOptions) -> Rendered:
    """Returns the token ids of a conversation, and which of them the model itself generates."""

  def read_ids(self, options: ChatOptions) -> AnswerStream:
    """Returns a reader of the ids of one answer to a prompt that was rendered with `options`."""

  def read_text(self, options: ChatOptions) -> AnswerStream:
    """Returns a reader of one answer as text with its markers written out."""


class XtmlFormat:
  """Kimi K3's format."""

  name = "kimi_k3"
  has_thinking = True

  def __init__(self, tokenizer: KimiTokenizer):
    """Takes a vocabulary that has the markers."""
    self._tokenizer = tokenizer

  def render(self, conversation: Conversation, options: ChatOptions) -> Rendered:
    """As `xtml_render.render`."""
    return xtml_render.render(conversation, self._tokenizer, options)

  def read_ids(self, options: ChatOptions) -> AnswerStream:
    """Returns a reader of the ids of one answer."""
    pieces = IdPieces(self._tokenizer, xtml_parse.MARKERS)
    return AnswerStream(pieces, xtml_parse.XtmlParser(thinking=options.thinking))

  def read_text(self, options: ChatOptions) -> AnswerStream:
    """Returns a reader of one answer as text with its markers written out."""
    return AnswerStream(TextPieces(xtml_parse.MARKERS), xtml_parse.XtmlParser(thinking=options.thinking))


class KimiK2Format:
  """Kimi-Linear's format."""

  name = "kimi_k2"
  has_thinking = False

  def __init__(self, tokenizer: KimiTokenizer):
    """Takes a vocabulary that has the markers."""
    self._tokenizer = tokenizer

  def render(self, conversation: Conversation, options: ChatOptions) -> Rendered:
    """As `kimi_k2_render.render`."""
    return kimi_k2_render.render(conversation, self._tokenizer, options)

  def read_ids(self, options: ChatOptions) -> AnswerStream:
    """Returns a reader of the ids of one answer; no option changes it."""
    return AnswerStream(IdPieces(self._tokenizer, kimi_k2_parse.MARKERS), kimi_k2_parse.KimiK2Parser())

  def read_text(self, options: ChatOptions) -> AnswerStream:
    """Returns a reader of one answer as text with its markers written out; no option changes it."""
    return AnswerStream(TextPieces(kimi_k2_parse.MARKERS), kimi_k2_parse.KimiK2Parser())


def chat_format(tokenizer: KimiTokenizer) -> ChatFormat:
  """Chooses the format by the markers that the vocabulary has.

  Raises:
    InputError: it has those of no format, so the model cannot chat.
  """
  lacking = {}
  for kind, markers in ((XtmlFormat, xtml_render.MARKERS), (KimiK2Format, kimi_k2_render.MARKERS)):
    lacking[kind.name] = [name for name in markers if not _has(tokenizer, name)]
    if not lacking[kind.name]:
      return kind(tokenizer)
  missing = "; ".join(f"{name} lacks {', '.join(names)}" for name, names in lacking.items())
  raise InputError(f"vocabulary without a chat format: {missing}")


def _has(tokenizer: KimiTokenizer, name: str) -> bool:
  try:
    tokenizer.special_id(name)
  except InputError:
    return False
  return True
