"""Trains a small byte-pair vocabulary in the published file format.

    python -m MaxText.tokenizers.training DIRECTORY --vocab_size 1024

The text is the installed Python standard library's own source, which every machine has. A merge is identified
by the bytes it makes, not by its two halves, because that is how tiktoken applies ranks: the tokens counted
while training are then exactly those that encoding gives later.
"""

import argparse
import heapq
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import regex

from MaxText.common.errors import InputError, UserError
from MaxText.tokenizers.kimi import SPLIT_PATTERN, KimiTokenizer
from MaxText.tokenizers.vocabulary import NUM_SPECIALS, write_vocabulary

HELD_OUT_EVERY = 10  # one file in ten is kept for measuring

# in the order of the published file: printable bytes first
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [bytes([byte]) for byte in (*_PRINTABLE, *sorted(set(range(256)) - set(_PRINTABLE)))]

# tests, generated tables, bundled programs, and what the machine adds to its own installation
_EXCLUDED = {*"test tests idlelib lib2to3 encodings pydoc_data turtledemo site-packages __pycache__".split()}


def standard_library() -> tuple[list[str], list[str]]:
  """Returns the texts of the standard library's modules, (for training, held out), in a fixed order."""
  root = Path(sysconfig.get_path("stdlib"))
  names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
  names = [
    name for name in names if not _EXCLUDED & set(name.split("/")) and not name.startswith("_sysconfigdata")
  ]
  texts = [(root / name).read_text(encoding="utf-8") for name in names]
  held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
  return [text for i, text in enumerate(texts, start=1) if i % HELD_OUT_EVERY], held_out


def count_pieces(texts: Iterable[str]) -> Counter[bytes]:
  """Counts the pieces that the split pattern cuts `texts` into; no merge crosses a piece."""
  # (?V1) turns on set intersection, which the pattern writes as tiktoken does
  split = regex.compile(f"(?V1){SPLIT_PATTERN}")
  return Counter(match[0].encode() for text in texts for match in split.finditer(text))


def train_ranks(pieces: Mapping[bytes, int], size: int) -> dict[bytes, int]:
  """Learns `size` ranks: the 256 bytes, then the most frequent pair of the moment, again and again.

  Args:
    pieces: how often each piece occurs, from `count_pieces`.
    size: ranks to make, at least 256.

  Returns:
    Rank of each token. Equal counts are decided by the bytes, so the result depends on nothing else.

  Raises:
    InputError: `size` is less than the number of bytes, or the text has too few different pairs.
  """
  if size < len(BYTES):
    raise InputError(
      f"vocabulary of {size} ranks: too small, expected {len(BYTES)} or more, one for each byte"
    )
  ranks = {token: rank for rank, token in enumerate(BYTES)}
  pairs = _Pairs(pieces)
  while len(ranks) < size:
    merged = pairs.pop_most_frequent()
    if merged is None:
      raise InputError(f"text too small for a vocabulary of {size} ranks: it gives {len(ranks)}")
    ranks[merged] = len(ranks)
    pairs.merge(merged, ranks)
  return ranks


class _Pairs:
  """Counts of neighbouring tokens over all pieces, kept up to date as pairs are merged."""

  def __init__(self, pieces: Mapping[bytes, int]):
    self._words = [[bytes([byte]) for byte in piece] for piece in pieces]
    self._weights = list(pieces.values())
    self._counts: Counter[bytes] = Counter()
    self._places: defaultdict[bytes, set[int]] = defaultdict(set)
    for index in range(len(self._words)):
      self._count(index, self._weights[index])
    self._heap = [(-count, pair) for pair, count in self._counts.items()]
    heapq.heapify(self._heap)

  def _count(self, index: int, weight: int) -> set[bytes]:
    word = self._words[index]
    pairs = [left + right for left, right in zip(word, word[1:])]
    for pair in pairs:
      self._counts[pair] += weight
      self._places[pair].add(index)
    return set(pairs)

  def pop_most_frequent(self) -> bytes | None:
    """Removes and returns the pair with the highest count, None when nothing is left to merge."""
    while self._heap:
      negated, pair = heapq.heappop(self._heap)
      if (
        self._counts[pair] == -negated > 0
      ):  # an entry of an older count is stale; a newer one is in the heap
        return pair
    return None

  def merge(self, merged: bytes, ranks: Mapping[bytes, int]) -> None:
    """Applies the newest rank to every piece that has the pair."""
    changed: set[bytes] = set()
    for index in self._places.pop(merged):
      changed |= self._count(index, -self._weights[index])
      _apply_ranks(self._words[index], ranks)
      changed |= self._count(index, self._weights[index])
    for pair in changed - {merged}:
      heapq.heappush(self._heap, (-self._counts[pair], pair))


def _apply_ranks(word: list[bytes], ranks: Mapping[bytes, int]) -> None:
  """Merges the leftmost pair of the lowest rank until no neighbours make a token, as tiktoken does."""
  while True:
    known = [
      (ranks[word[i] + word[i + 1]], i) for i in range(len(word) - 1) if word[i] + word[i + 1] in ranks
    ]
    if not known:
      return
    _, at = min(known)
    word[at : at + 2] = [word[at] + word[at + 1]]


def main(arguments: Sequence[str] | None = None) -> int:
  """Trains on the standard library, writes both files, and prints the bytes per token of held-out text."""
  parser = argparse.ArgumentParser(description=main.__doc__)
  parser.add_argument("directory", type=Path, help="where tiktoken.model and tokenizer_config.json go")
  parser.add_argument(
    "--vocab_size", type=int, default=1024, help=f"ids in all, {NUM_SPECIALS} of them special"
  )
  args = parser.parse_args(arguments)
  smallest = len(BYTES) + NUM_SPECIALS
  try:
    if args.vocab_size < smallest:
      raise InputError(
        f"--vocab_size {args.vocab_size}: too small, expected {smallest} or more: "
        f"{len(BYTES)} bytes and {NUM_SPECIALS} special ids"
      )
    _train(args.directory, args.vocab_size)
  except (UserError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


def _train(directory: Path, vocab_size: int) -> None:
  train, held_out = standard_library()
  write_vocabulary(directory, train_ranks(count_pieces(train), vocab_size - NUM_SPECIALS))
  tokenizer = KimiTokenizer.from_directory(directory, vocab_size)
  tokens = sum(len(tokenizer.encode(text)) for text in held_out)
  size = sum(len(text.encode()) for text in held_out)
  print(f"{vocab_size} ids, {size / tokens:.3f} bytes per token on {len(held_out)} held-out files")


if __name__ == "__main__":
  sys.exit(main())
