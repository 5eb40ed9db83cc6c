"""Packed batches of documents, in an order that depends on nothing but the seed, resumable at any step.

A row is T + 1 consecutive tokens of the stream of documents; the next row begins with the last token of the
row before, so that each token behind another of its document is predicted once. The place of the next row in
the stream is the whole state: neither threads nor batch size change what a resumed run sees. Packing is told
by segment ids: no target lies in another document than its input.
"""

import collections
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grain
import numpy as np

from MaxText.common.errors import CheckpointError, InputError
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.training.documents import Documents

Batch = dict[str, np.ndarray]
PADDING = 0  # segment of no document


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


class PackedBatches(grain.IterDataset):
  """Batches [B, T] of packed rows, with the keys that maxtext's loss reads."""

  def __init__(self, documents: grain.MapDataset, batch: int, length: int, threads: int, identity: dict):
    """Says what to pack.

    Args:
      documents: token ids by number, in the order of training.
      batch: rows B of a batch.
      length: tokens T of a row.
      threads: documents tokenised at a time, ahead of their use; 0 for none.
      identity: stored with the position; a checkpoint of other data or another order is refused.
    """
    super().__init__(documents)
    self.documents, self.batch, self.length = documents, batch, length
    self.threads, self.identity = threads, identity

  def __iter__(self) -> "PackedIterator":
    return PackedIterator(self)


class PackedIterator(grain.DatasetIterator):
  """The stream of batches; its state is the next token: which document, and where in it."""

  _parent = None  # maxtext looks for worker processes above the iterator, and grain asserts that something is

  def __init__(self, dataset: PackedBatches):
    super().__init__()
    self._dataset = dataset
    self._document, self._offset = 0, 0
    self._ahead: collections.OrderedDict[int, Future] = collections.OrderedDict()
    self._pool = ThreadPoolExecutor(dataset.threads) if dataset.threads else None

  def __next__(self) -> Batch:
    rows = [self._row() for _ in range(self._dataset.batch)]
    if rows[0] is None:
      raise StopIteration
    # the last batch of finite data is filled up with padding
    length = self._dataset.length + 1
    blank = np.zeros(length, np.int32), np.full(length, PADDING, np.int32)
    ids, segments = (np.stack(part) for part in zip(*(row or blank for row in rows)))
    return as_batch(ids, segments)

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

  def _row(self) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and segments [T + 1] of the next row, or None at the end of the data."""
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
    return (ids, segments) if filled else None

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
