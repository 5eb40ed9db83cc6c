"""Reads the safetensors files of a published directory: headers first, then only the bytes that are asked
for.

The headers are parsed here rather than by the safetensors library because every defect has to be told apart
by name, and because the library maps a whole shard: pages once touched stay resident, so a load would hold
the file beside the arrays. Here each tensor is mapped alone and unmapped when its view is dropped.

Source: the safetensors format (8-byte little-endian header length, JSON header, data); spec 3.
"""

import json
import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from MaxText.checkpoints.names import VISION_PREFIXES
from MaxText.common.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
  "F32": np.dtype(np.float32),
  "BF16": np.dtype(jnp.bfloat16),
  "F16": np.dtype(np.float16),
  "U8": np.dtype(np.uint8),
}
_MAX_HEADER = 100_000_000  # the library's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
  """One tensor of a file: `start` is its first byte counted from the beginning of `shard`."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  shard: str
  start: int
  nbytes: int


@dataclass(frozen=True)
class PublishedFiles:
  """The tensors of a published directory, known from headers alone.

  Attributes:
    directory: where the shards lie.
    entries: text tensors by name.
    skipped: vision tensors, which this package does not use.
    metadata: the `__metadata__` of the first shard, or None.
    reads: how often each tensor was mapped, for tests and for the accounting of partial loads.
  """

  directory: Path
  entries: dict[str, TensorEntry]
  skipped: dict[str, TensorEntry]
  metadata: dict[str, str] | None
  reads: Counter = field(default_factory=Counter)

  def array(self, name: str) -> np.ndarray:
    """Maps tensor `name` read-only; its pages are read when touched and released with the array.

    Raises:
      CheckpointError: the file has become unreadable since its header was checked.
    """
    entry = self.entries[name]
    self.reads[name] += 1
    if not entry.nbytes:
      return np.zeros(entry.shape, DTYPES[entry.dtype])
    path = self.directory / entry.shard
    aligned = entry.start - entry.start % mmap.ALLOCATIONGRANULARITY
    offset = entry.start - aligned
    try:
      with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), offset + entry.nbytes, access=mmap.ACCESS_READ, offset=aligned)
    except (OSError, ValueError) as error:
      raise CheckpointError(f"{path}: cannot read tensor {name}: {error}") from error
    dtype = DTYPES[entry.dtype]
    flat = np.frombuffer(pages, dtype, count=entry.nbytes // dtype.itemsize, offset=offset)
    return flat.reshape(entry.shape)

  def bytes_by_dtype(self) -> dict[str, int]:
    """Sums the stored bytes of every tensor, skipped ones included, by safetensors type."""
    totals: Counter = Counter()
    for entry in (*self.entries.values(), *self.skipped.values()):
      totals[entry.dtype] += entry.nbytes
    return dict(totals)


def is_published(directory: Path) -> bool:
  """Whether `directory` holds safetensors in the published layout."""
  return (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file()


def open_published(directory: str | Path) -> PublishedFiles:
  """Reads and checks every header below `directory`, without touching tensor data.

  Raises:
    CheckpointError: no checkpoint there; a shard is missing, truncated or unreadable; a tensor lies outside
      its file, overlaps another, stands in two shards; bytes belong to no tensor; or the index and the shards
      disagree.
  """
  directory = Path(directory)
  if not directory.is_dir():
    raise CheckpointError(f"{directory}: no such checkpoint directory")
  if (directory / SINGLE_FILE).is_file():
    entries, metadata = _read_header(directory / SINGLE_FILE)
  elif (directory / INDEX_FILE).is_file():
    entries, metadata = _read_shards(directory)
  else:
    raise CheckpointError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
  text = {name: entry for name, entry in entries.items() if not name.startswith(VISION_PREFIXES)}
  skipped = {name: entry for name, entry in entries.items() if name not in text}
  return PublishedFiles(directory, text, skipped, metadata)


def _read_shards(directory: Path) -> tuple[dict[str, TensorEntry], dict[str, str] | None]:
  path = directory / INDEX_FILE
  index = read_json(path)
  shard_of = index.get("weight_map") if isinstance(index, dict) else None
  if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
    raise CheckpointError(f"{path}: expected an object 'weight_map' from tensor names to file names")
  entries: dict[str, TensorEntry] = {}
  metadata = None
  for shard in sorted(set(shard_of.values())):
    if not (directory / shard).is_file():
      named = sum(1 for other in shard_of.values() if other == shard)
      raise CheckpointError(
        f"{directory}: shard {shard} is missing; {INDEX_FILE} places {named} tensors in it"
      )
    found, shard_metadata = _read_header(directory / shard)
    metadata = metadata or shard_metadata
    for name, entry in found.items():
      if name in entries:
        raise CheckpointError(f"{directory}: tensor {name} stands in both {entries[name].shard} and {shard}")
      entries[name] = entry
  _check_index(directory, shard_of, entries)
  return entries, metadata


def _check_index(directory: Path, shard_of: dict[str, str], entries: dict[str, TensorEntry]) -> None:
  for name, shard in shard_of.items():
    if name not in entries:
      raise CheckpointError(
        f"{directory}: {INDEX_FILE} places tensor {name} in {shard}, which does not hold it"
      )
    if entries[name].shard != shard:
      raise CheckpointError(
        f"{directory}: {INDEX_FILE} places tensor {name} in {shard}, but it stands in {entries[name].shard}"
      )
  for name, entry in entries.items():
    if name not in shard_of:
      raise CheckpointError(
        f"{directory}: {entry.shard} holds tensor {name}, which {INDEX_FILE} does not name"
      )


def read_json(path: Path) -> Any:
  """Returns the JSON value in `path`.

  Raises:
    CheckpointError: unreadable, or not JSON.
  """
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{path}: not readable as JSON: {error}") from error


def _read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str] | None]:
  try:
    size = path.stat().st_size
    with path.open("rb") as file:
      prefix = file.read(8)
      length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
      if length > _MAX_HEADER or 8 + length > size:
        raise CheckpointError(f"{path}: truncated or not safetensors: {size} bytes do not hold the header")
      raw = file.read(length)
  except OSError as error:
    raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
  header = _parse_header(path, raw)
  metadata = header.pop("__metadata__", None)
  entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
  _check_ranges(path, entries.values(), 8 + length, size)
  return entries, metadata


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = Counter(name for name, _ in pairs)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
      raise CheckpointError(f"{path}: tensor {twice[0]} stands twice in the header")
    return dict(pairs)

  try:
    header = json.loads(raw, object_pairs_hook=unique)
  except ValueError as error:
    raise CheckpointError(f"{path}: header is not JSON: {error}") from error
  if not isinstance(header, dict):
    raise CheckpointError(f"{path}: header is not a JSON object")
  return header


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
  try:
    dtype, shape = value["dtype"], tuple(int(n) for n in value["shape"])
    begin, end = (int(offset) for offset in value["data_offsets"])
  except (KeyError, TypeError, ValueError) as error:
    raise CheckpointError(f"{path}: tensor {name} has an unreadable header entry {value!r}") from error
  if dtype not in DTYPES:
    raise CheckpointError(f"{path}: tensor {name} has type {dtype}, expected one of {', '.join(DTYPES)}")
  nbytes = math.prod(shape) * DTYPES[dtype].itemsize
  if end - begin != nbytes:
    raise CheckpointError(
      f"{path}: tensor {name} {dtype} {list(shape)} takes {nbytes} bytes, but its range has {end - begin}"
    )
  return TensorEntry(name, dtype, shape, path.name, data_start + begin, nbytes)


def _check_ranges(path: Path, entries: Any, data_start: int, size: int) -> None:
  end, previous = data_start, None
  for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
    if entry.start < end:
      neighbour = f"overlaps {previous}" if previous else "starts inside the header"
      raise CheckpointError(f"{path}: tensor {entry.name} {neighbour}")
    stop = entry.start + entry.nbytes
    if stop > size:
      raise CheckpointError(
        f"{path}: truncated: tensor {entry.name} ends at byte {stop}, but the file has {size} bytes"
      )
    if entry.start > end:
      raise CheckpointError(f"{path}: {entry.start - end} bytes before tensor {entry.name} belong to none")
    end, previous = stop, entry.name
  if end < size:
    raise CheckpointError(f"{path}: {size - end} bytes at the end belong to no tensor")
