"""Packed batches of documents, in an order that depends on nothing but the seed, resumable at any step.

A row is T + 1 consecutive tokens of the stream of documents; the next row begins with the last token of the
row before, so that each token behind another of its document is predicted once. Rows of a long document would
make batches of one subject, so they are served in random order within windows. The place of a window in the
stream, and of the next row in the window, is the whole state: neither threads nor batch size change what a
resumed run sees. Packing is told by segment ids: no target lies in another document than its input.

Dims: B rows of a batch, T tokens of a row.
"""

import collections
import functools
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grain
import numpy as np
from grain.experimental import WindowShuffleIterDataset

from MaxText.common.errors import CheckpointError, InputError
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.training.documents import Documents

Batch = dict[str, np.ndarray]
Row = tuple[np.ndarray, np.ndarray]  # ids and segments, int32 [T + 1] each
PADDING = 0  # segment of no document
# tells vocabularies apart
_SAMPLE = "def main(argv): return 12345  # naïve café, 尼罗河 and the rest of it\n"


def packed_documents(
  documents: Documents,
  tokenizer: KimiTokenizer,
  end: int,
  *,
  batch: int,
  length: int,
  threads: int = 0,
  seed: int | None = None,
  window: int = 1,
  epochs: int | None = None,
  shard: tuple[int, int] = (0, 1),
) -> grain.IterDataset:
  """Returns the batches of one process.

  Args:
    documents: texts by number.
    tokenizer: makes ids of them.
    end: id that closes each document.
    batch: rows of a batch of this process.
    length: tokens of a row.
    threads: that tokenise ahead.
    seed: of the order; None keeps the order of the files.
    window: packed rows that are served in random order.
    epochs: how often each document comes; None for without end.
    shard: (number of this process, number of processes).
  """
  order = ordered(documents, seed, epochs, shard).map(Tokenized(tokenizer, end))
  vocabulary = hashlib.sha256(repr(tokenizer.encode(_SAMPLE)).encode()).hexdigest()[:12]
  window = 1 if seed is None else window
  identity = {"documents": len(documents), "bytes": documents.size, "seed": seed, "shard": list(shard)}
  identity |= {"vocabulary": vocabulary, "end": end}
  # a place in a window counts rows, so what is a row may not change
  identity |= {"grain_shuffle_buffer_size": window, "max_target_length": length}
  return shuffled_batches(PackedRows(order, length, threads, identity), batch, window, seed or 0)


class Tokenized(grain.transforms.Map):
  """Token ids of a text, closed by the end id; an empty text has none."""

  def __init__(self, tokenizer: KimiTokenizer, end: int):
    self._tokenizer, self._end = tokenizer, end

  def map(self, element: str) -> np.ndarray:
    """Returns int32 ids [n]."""
    ids = self._tokenizer.encode(element)
    return np.array([*ids, self._end] if ids else [], np.int32)


def ordered(
  documents: Documents, seed: int | None, epochs: int | None, shard: tuple[int, int]
) -> grain.MapDataset:
  """Documents in the order of training: those of this process, shuffled anew in each epoch, and repeated.

  Args:
    documents: all of them.
    seed: of the order; None keeps the order of the files.
    epochs: how often each document comes; None for without end.
    shard: (number of this process, number of processes).
  """
  dataset = grain.MapDataset.source(documents)
  if shard[1] > 1:
    dataset = dataset[shard[0] :: shard[1]]
  if seed is not None:
    dataset = dataset.seed(seed).shuffle()
  return dataset.repeat(epochs)


def shuffled_batches(rows: "PackedRows", batch: int, window: int, seed: int) -> grain.IterDataset:
  """Returns batches [B, T] with the keys that maxtext's loss reads; the last one is filled up with padding.

  Args:
    rows: packed.
    batch: rows B of a batch.
    window: rows that are packed ahead and served in random order; 1 keeps the order of the stream.
    seed: of that order.
  """
  seed = int(
    np.random.SeedSequence(seed).generate_state(1)[0] >> 1
  )  # grain adds the window's number, in 32 bits
  shuffled = WindowShuffleIterDataset(rows, window_size=window, seed=seed)
  return shuffled.batch(batch, drop_remainder=False, batch_fn=functools.partial(_stacked, size=batch))


def _stacked(rows: Sequence[Row], size: int) -> Batch:
  """One batch of `size` rows, of which those at the end of the data are padding."""
  blank = tuple(np.full_like(part, PADDING) for part in rows[0])
  return as_batch(*(np.stack(part) for part in zip(*rows, *[blank] * (size - len(rows)))))


class PackedRows(grain.IterDataset):
  """Rows of consecutive tokens, in the order of the documents."""

  def __init__(self, documents: grain.MapDataset, length: int, threads: int, identity: dict):
    """Says what to pack.

    Args:
      documents: token ids by number, in the order of training.
      length: tokens T of a row.
      threads: documents tokenised at a time, ahead of their use; 0 for none.
      identity: stored with the position; a checkpoint of other data or another order is refused.
    """
    super().__init__(documents)
    self.documents, self.length = documents, length
    self.threads, self.identity = threads, identity

  def __iter__(self) -> "RowIterator":
    return RowIterator(self)


class RowIterator(grain.DatasetIterator):
  """The stream of rows; its state is the next token: which document, and where in it."""

  _parent = None  # maxtext looks for worker processes above the iterator, and grain asserts that something is

  def __init__(self, dataset: PackedRows):
    super().__init__()
    self._dataset = dataset
    self._document, self._offset = 0, 0
    self._ahead: collections.OrderedDict[int, Future] = collections.OrderedDict()
    self._pool = ThreadPoolExecutor(dataset.threads) if dataset.threads else None

  def __next__(self) -> Row:
    length = self._dataset.length + 1
    ids, segments = np.zeros(length, np.int32), np.full(length, PADDING, np.int32)
    number, offset = self._document, self._offset
    filled = segment = 0
    while filled < length and (tokens := self._tokens(number)) is not None:
      if not filled and number - self._document > self._dataset.identity["documents"]:
        raise InputError("no document of the training data has any text")
      piece = tokens[offset : offset + length - filled]
      if len(piece):
        segment += 1
        ids[filled : filled + len(piece)] = piece
        segments[filled : filled + len(piece)] = segment
        filled += len(piece)
        offset += len(piece)
      if offset >= len(tokens):
        number, offset = number + 1, 0
    self._document, self._offset = number, max(offset - 1, 0)
    if not filled:
      raise StopIteration
    return ids, segments

  def get_state(self) -> dict[str, Any]:
    """Position of the next row, and which data it is a position in."""
    return {"document": self._document, "offset": self._offset, "data": self._dataset.identity}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues at a stored position.

    Raises:
      CheckpointError: it is a position in other data, or in another order of them.
    """
    check_identity(state["data"], self._dataset.identity)
    self._ahead.clear()
    self._document, self._offset = state["document"], state["offset"]

  def close(self) -> None:
    """Stops the threads."""
    if not self._closed and self._pool is not None:
      self._pool.shutdown(wait=False, cancel_futures=True)
    super().close()

  def _tokens(self, number: int) -> np.ndarray | None:
    documents = self._dataset.documents
    if number >= len(documents):
      return None
    if self._pool is None:
      return documents[number]
    for passed in [key for key in self._ahead if key < number]:
      del self._ahead[passed]
    for wanted in range(number, min(number + 2 * self._dataset.threads, len(documents))):
      if wanted not in self._ahead:
        self._ahead[wanted] = self._pool.submit(documents.__getitem__, wanted)
    return self._ahead[number].result()


def check_identity(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
  """Refuses a stored position in other data, or in another order of them.

  Raises:
    CheckpointError: with what differs.
  """
  both = [(key, theirs.get(key), now) for key, now in ours.items()]
  if changed := [f"{key} {then} then, {now} now" for key, then, now in both if then != now]:
    raise CheckpointError(f"the checkpoint was trained on other data: {'; '.join(changed)}")


def as_batch(ids: np.ndarray, segments: np.ndarray) -> Batch:
  """Splits rows [B, T + 1] into inputs and next-token targets [B, T].

  A target counts where it belongs to the document of its input: `targets_segmentation` is 0 elsewhere.
  """
  inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)
  positions = _positions(segments)
  return {
    "inputs": ids[:, :-1],
    "inputs_position": positions[:, :-1],
    "inputs_segmentation": segments[:, :-1],
    "targets": ids[:, 1:],
    "targets_position": positions[:, 1:],
    "targets_segmentation": np.where(inside, segments[:, 1:], PADDING),
  }


def _positions(segments: np.ndarray) -> np.ndarray:
  """Place of each token within its segment."""
  at = np.broadcast_to(np.arange(segments.shape[1], dtype=np.int32), segments.shape)
  begins = np.concatenate([np.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
  return at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
