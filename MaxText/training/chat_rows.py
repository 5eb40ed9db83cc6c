"""Packed batches of chats, of which the loss counts the assistant's own tokens only.

A chat is never cut: one that does not fit into what is left of a row begins the next row. The number of the
next chat is the whole state, so that a resumed run goes on exactly. Segment ids keep chats apart, as they do
documents.

Dims: B rows of a batch, T tokens of a row.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np
from tqdm import tqdm

from MaxText.common.errors import CheckpointError, InputError
from MaxText.tokenizers.chat.formats import ChatFormat
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.training import data
from MaxText.training.chat_data import ChatExample, read_examples
from MaxText.training.documents import matching_files


class Chats:
  """Conversations by number, tokenised when they are opened, so that a mistake is told before anything slow.

  Attributes:
    size: tokens of all of them.
    learnt: tokens that the loss counts.
    digest: tells two collections apart.
  """

  def __init__(self, examples: list[ChatExample]):
    self._examples = examples
    self.size = sum(len(example.ids) for example in examples)
    self.learnt = sum(int(example.is_output.sum()) for example in examples)
    digest = hashlib.sha256()
    for example in examples:
      digest.update(example.ids.tobytes() + example.is_output.tobytes())
    self.digest = digest.hexdigest()[:12]

  def __len__(self) -> int:
    return len(self._examples)

  def __getitem__(self, number: int) -> ChatExample:
    return self._examples[number]


def find_chats(key: str, spec: str | None, chat: ChatFormat, length: int, options: ChatOptions) -> Chats:
  """Opens and renders the jsonl files that a configuration key names.

  Args:
    key: the key, for messages.
    spec: files, directories and patterns, separated by commas.
    chat: the model's chat format.
    length: tokens T of a row; the longest chat has one more.
    options: whether and how much the model thinks.

  Raises:
    InputError: nothing is named, a file is no jsonl of OpenAI messages, or a chat is longer than a row.
  """
  if spec is None:
    raise InputError(f"{key}: needed: a .jsonl file of conversations, one object with 'messages' a line")
  examples: list[ChatExample] = []
  files = matching_files(key, spec)
  for path in tqdm(files, desc="reading chats", disable=len(files) < 2 or not sys.stderr.isatty()):
    _check_kind(key, path)
    examples += read_examples(path, chat, max_tokens=length + 1, options=options)
  return Chats(examples)


def _check_kind(key: str, path: Path) -> None:
  if path.suffix != ".jsonl":
    raise InputError(f"{key}: {path}: expected .jsonl, one object with 'messages' a line")


def packed_chats(
  chats: Chats,
  *,
  batch: int,
  length: int,
  seed: int | None = None,
  epochs: int | None = None,
  shard: tuple[int, int] = (0, 1),
) -> "ChatBatches":
  """Returns the batches of one process; arguments as `data.packed_documents`.

  Args:
    chats: by number.
    batch: rows B of a batch of this process.
    length: tokens T of a row.
    seed: of the order; None keeps the order of the files.
    epochs: how often each chat comes; None for without end.
    shard: (number of this process, number of processes).
  """
  identity = {"chats": len(chats), "tokens": chats.digest, "seed": seed, "shard": list(shard)}
  return ChatBatches(data.ordered(chats, seed, epochs, shard), batch, length, identity)


class ChatBatches(grain.IterDataset):
  """Batches [B, T] of packed chats, with the keys that maxtext's loss reads."""

  def __init__(self, chats: grain.MapDataset, batch: int, length: int, identity: dict):
    """Says what to pack.

    Args:
      chats: examples by number, in the order of training.
      batch: rows B of a batch.
      length: tokens T of a row.
      identity: stored with the position; a checkpoint of other data or another order is refused.
    """
    super().__init__(chats)
    self.chats, self.batch, self.length, self.identity = chats, batch, length, identity

  def __iter__(self) -> "ChatIterator":
    return ChatIterator(self)


class ChatIterator(grain.DatasetIterator):
  """The stream of batches; its state is the number of the next chat."""

  _parent = None  # maxtext looks for worker processes above the iterator, and grain asserts that something is

  def __init__(self, dataset: ChatBatches):
    super().__init__()
    self._dataset, self._next = dataset, 0

  def __next__(self) -> data.Batch:
    begun = self._next
    ids, segments, outputs = (
      np.stack(part) for part in zip(*(self._row() for _ in range(self._dataset.batch)))
    )
    if self._next == begun:
      raise StopIteration
    batch = data.as_batch(ids, segments)
    # token t is predicted at t - 1: the mask of the targets is that of the tokens themselves, one to the left
    learnt = np.where(outputs[:, 1:], batch["targets_segmentation"], data.PADDING)
    return batch | {"targets_segmentation": learnt}

  def get_state(self) -> dict[str, Any]:
    """Number of the next chat, and which data it counts."""
    return {"chat": self._next, "data": self._dataset.identity}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues at a stored position.

    Raises:
      CheckpointError: it is a position in other data, or in another order of them.
    """
    data.check_identity(state["data"], self._dataset.identity)
    if "chat" not in state:
      raise CheckpointError("the checkpoint was trained on documents, not on chats")
    self._next = state["chat"]

  def _row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, segments and outputs [T + 1] of whole chats; all padding at the end of the data."""
    size = self._dataset.length + 1
    ids, segments = np.zeros(size, np.int32), np.full(size, data.PADDING, np.int32)
    outputs = np.zeros(size, bool)
    filled = segment = 0
    while self._next < len(self._dataset.chats):
      chat: ChatExample = self._dataset.chats[self._next]
      end = filled + len(chat.ids)
      if end > size:
        break
      segment += 1
      ids[filled:end], segments[filled:end], outputs[filled:end] = chat.ids, segment, chat.is_output
      filled, self._next = end, self._next + 1
    return ids, segments, outputs
