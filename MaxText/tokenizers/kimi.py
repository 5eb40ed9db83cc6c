"""The tokenizer of Kimi K3 and Kimi-Linear: byte pairs through the tiktoken library, no downloaded code.

Text is always encoded as ordinary text: `<|open|>` typed by a user gives the ids of those eight characters.
Special ids are reached by name, through `special_id`, by whoever builds a prompt on purpose.

Source: spec section 1.5.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

from MaxText.common.errors import CheckpointError, InputError, did_you_mean
from MaxText.tokenizers import vocabulary
from MaxText.tokenizers.vocabulary import SpecialTokens

# `&&` is set intersection in the regular expressions of tiktoken: letters outside the Han script
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
  (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
  )
)

# longer input overflows the stack of the regular expression; the published tokenizer cuts at the same places
MAX_PIECE = 400_000  # characters
MAX_RUN = 25_000  # consecutive space characters, or consecutive others


def cut(text: str) -> Iterator[str]:
  """Yields `text` in pieces that are encoded one by one.

  A piece has at most `MAX_PIECE` characters and no run of more than `MAX_RUN` space (or other) characters.
  """
  for start in range(0, len(text), MAX_PIECE):
    piece = text[start : start + MAX_PIECE]
    runs = re.finditer(r"\S+|\s+", piece) if len(piece) > MAX_RUN else ()
    bounds = [0, *(at for run in runs for at in range(run.start() + MAX_RUN, run.end(), MAX_RUN)), len(piece)]
    for begin, end in zip(bounds, bounds[1:]):
      yield piece[begin:end]


class KimiTokenizer:
  """Encodes ordinary text, decodes ids, and names the special ids.

  Attributes:
    vocab_size: base ranks plus special ids; every id below it decodes.
    stop_ids: ids that end a generated answer: of K3 both `[EOS]` and `<|end_of_msg|>`.
  """

  def __init__(self, ranks: dict[bytes, int], specials: SpecialTokens):
    """Builds the tokenizer from checked ranks (`vocabulary.read_ranks`) and the special tokens after them."""
    self.vocab_size = len(ranks) + len(specials.ids)
    self.stop_ids = specials.stop_ids
    self._special_ids = dict(specials.ids)
    self._hidden = frozenset(specials.ids.values()) - specials.markers
    self._encoding = tiktoken.Encoding(
      "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self._special_ids
    )

  @classmethod
  def from_files(cls, ranks_file: Path, config_file: Path) -> "KimiTokenizer":
    """Reads `tiktoken.model` and `tokenizer_config.json`.

    Raises:
      CheckpointError: a file is missing, damaged, or does not fit the other.
    """
    ranks = vocabulary.read_ranks(ranks_file)
    return cls(ranks, vocabulary.read_specials(config_file, first_id=len(ranks)))

  @classmethod
  def from_directory(cls, directory: Path, vocab_size: int | None = None) -> "KimiTokenizer":
    """Reads the two files of a checkpoint directory.

    Args:
      directory: holds `tiktoken.model` and `tokenizer_config.json`.
      vocab_size: ids of the model; None accepts any.

    Raises:
      CheckpointError: as `from_files`, or the vocabulary has not `vocab_size` ids.
    """
    directory = Path(directory)
    tokenizer = cls.from_files(directory / vocabulary.VOCABULARY_FILE, directory / vocabulary.CONFIG_FILE)
    if vocab_size not in (None, tokenizer.vocab_size):
      raise CheckpointError(
        f"{directory / vocabulary.VOCABULARY_FILE}: wrong vocabulary, "
        f"expected {vocab_size} ids as the model has, got {tokenizer.vocab_size}"
      )
    return tokenizer

  def encode(self, text: str) -> list[int]:
    """Encodes `text` as ordinary text; no input can give a special id, and none is added."""
    return [token for piece in cut(text) for token in self._encoding.encode_ordinary(piece)]

  def special_id(self, name: str) -> int:
    """Returns the id of a special token.

    Raises:
      InputError: no special token has that name.
    """
    if name not in self._special_ids:
      raise InputError(f"special token {name!r}: unknown{did_you_mean(name, self._special_ids)}")
    return self._special_ids[name]

  def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
    """Returns the bytes of `ids`, which may begin or end within a character.

    Args:
      ids: token ids.
      skip_special: leave out control tokens; markers published with `special=false` stay.

    Raises:
      InputError: an id is not in the vocabulary.
    """
    kept = []
    for token in map(int, ids):
      if not 0 <= token < self.vocab_size:
        raise InputError(f"token id {token}: outside the vocabulary, expected 0 to {self.vocab_size - 1}")
      if not (skip_special and token in self._hidden):
        kept.append(token)
    return self._encoding.decode_bytes(kept)

  def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
    """Returns the text of `ids`, as `decode_bytes`; bytes that are no UTF-8 become U+FFFD."""
    return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")
