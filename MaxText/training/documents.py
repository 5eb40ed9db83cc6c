"""Documents by number, read from the files that people have: text, jsonl, parquet, array-record.

Nothing is copied or converted. A text file is one document; of the other kinds each line, row or record is.
"""

import bisect
import contextlib
import functools
import glob
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import grain
import numpy as np

from MaxText.common.errors import InputError, did_you_mean
from MaxText.tokenizers.training import standard_library

ROW_GROUPS_IN_MEMORY = (
  16  # of one parquet file: neighbouring rows are asked for together, shuffled ones are not
)


class Documents(Protocol):
  """Texts by number. `size` tells two collections apart without reading them."""

  size: int

  def __len__(self) -> int:
    """Number of documents."""
    ...

  def __getitem__(self, number: int) -> str:
    """Text of one document."""
    ...


def find_documents(key: str, spec: str | None, column: str) -> Documents:
  """Opens what a configuration key names.

  Args:
    key: the key, for messages.
    spec: files, directories and patterns, separated by commas; None for the standard library's own source.
    column: which field of a jsonl line, parquet row or array-record holds the text.

  Raises:
    InputError: nothing there, an empty file, an unreadable one, or no such column.
  """
  if spec is None:
    return StandardLibrary()
  files = matching_files(key, spec)
  texts = [path for path in files if _opener(path) is None]
  parts = [opener(key, path, column) for path in files if (opener := _opener(path))]
  together = Joined([*([TextFiles(key, texts)] if texts else []), *parts])
  if not len(together):
    raise InputError(f"{key}: {spec}: no document in {len(files)} files")
  return together


def matching_files(key: str, spec: str) -> list[Path]:
  """Returns the files that are not empty of what a configuration key names.

  Args:
    key: the key, for messages.
    spec: files, directories and patterns, separated by commas.

  Raises:
    InputError: nothing there, or an empty file.
  """
  files, empty = [], []
  for part in filter(None, (text.strip() for text in spec.split(","))):
    for path in _matches(key, part):
      (files if path.stat().st_size else empty).append(path)
      if not path.stat().st_size and str(path) == part:
        raise InputError(f"{key}: {path}: the file is empty")
  if not files:
    raise InputError(f"{key}: {spec}: " + (f"all {len(empty)} files are empty" if empty else "names no file"))
  return files


def _matches(key: str, part: str) -> list[Path]:
  """Files that one path, directory or pattern names, in the order of their names."""
  path = Path(part).expanduser()
  if path.is_file():
    return [path]
  if path.is_dir():
    inside = (file for file in path.rglob("*") if file.is_file())
    found = [file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts)]
  else:
    found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
  if not found:
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    raise InputError(f"{key}: {part}: no such file, directory or pattern{did_you_mean(path.name, beside)}")
  return sorted(found)


def _opener(path: Path) -> "type[JsonLines | Parquet | ArrayRecord] | None":
  kinds = {
    ".jsonl": JsonLines,
    ".parquet": Parquet,
    ".array_record": ArrayRecord,
    ".arrayrecord": ArrayRecord,
  }
  return kinds.get(path.suffix)


class Joined:
  """Several collections one behind the other."""

  def __init__(self, parts: Sequence[Documents]):
    self._parts = parts
    self._ends = list(itertools.accumulate(len(part) for part in parts))
    self.size = sum(part.size for part in parts)

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, number: int) -> str:
    part = bisect.bisect_right(self._ends, number)
    return self._parts[part][number - (self._ends[part - 1] if part else 0)]


class StandardLibrary:
  """Sources of the installed Python standard library, without the files held out for measuring."""

  def __init__(self):
    self._texts = standard_library()[0]
    self.size = sum(map(len, self._texts))

  def __len__(self) -> int:
    return len(self._texts)

  def __getitem__(self, number: int) -> str:
    return self._texts[number]


class TextFiles:
  """Whole files, each a document."""

  def __init__(self, key: str, paths: Sequence[Path]):
    self._key, self._paths = key, paths
    self.size = sum(path.stat().st_size for path in paths)

  def __len__(self) -> int:
    return len(self._paths)

  def __getitem__(self, number: int) -> str:
    path = self._paths[number]
    try:
      return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
      raise InputError(f"{self._key}: {path}: unreadable as UTF-8 text ({error})") from None


class JsonLines:
  """One JSON object a line; blank lines do not count."""

  def __init__(self, key: str, path: Path, column: str):
    self._key, self._path, self._column = key, path, column
    self.size = path.stat().st_size
    starts, lines, at = [], [], 0
    with self._opened() as file:
      for line, content in enumerate(file, 1):
        if content.strip():
          starts.append(at)
          lines.append(line)
        at += len(content)
    self._starts, self._lines = np.array(starts, np.int64), np.array(lines, np.int64)
    if starts:
      self[0]  # a wrong column is told at once

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, number: int) -> str:
    with self._opened() as file:
      file.seek(int(self._starts[number]))
      content = file.readline()
    place = f"{self._key}: {self._path}:{self._lines[number]}"
    try:
      value = json.loads(content)
    except ValueError as error:
      raise InputError(f"{place}: not JSON: {error}") from None
    return _field(value, self._column, place)

  @contextlib.contextmanager
  def _opened(self) -> Iterator[BinaryIO]:
    try:
      with self._path.open("rb") as file:
        yield file
    except OSError as error:
      raise InputError(f"{self._key}: {self._path}: unreadable ({error.strerror or error})") from None


class Parquet:
  """Rows of a parquet file; the row groups last asked for stay in memory."""

  def __init__(self, key: str, path: Path, column: str):
    import pyarrow
    from pyarrow import parquet

    self._key, self._path, self._column = key, path, column
    self.size = path.stat().st_size
    try:
      self._file = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
      raise InputError(f"{key}: {path}: unreadable as parquet ({error})") from None
    columns = self._file.schema_arrow.names
    if column not in columns:
      raise InputError(_no_column(f"{key}: {path}", column, columns))
    groups = self._file.metadata.num_row_groups
    self._ends = list(itertools.accumulate(self._file.metadata.row_group(i).num_rows for i in range(groups)))
    self._group = functools.lru_cache(ROW_GROUPS_IN_MEMORY)(self._read_group)
    self._turn = threading.Lock()  # threads share the file

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, number: int) -> str:
    group = bisect.bisect_right(self._ends, number)
    row = number - (self._ends[group - 1] if group else 0)
    with self._turn:
      value = self._group(group)[row].as_py()
    if not isinstance(value, str):
      raise InputError(f"{self._key}: {self._path}: row {number}: {self._column} is {value!r}, expected text")
    return value

  def _read_group(self, group: int) -> Any:
    import pyarrow

    try:
      return self._file.read_row_group(group, columns=[self._column]).column(0)
    except (OSError, pyarrow.ArrowException) as error:
      place = f"{self._key}: {self._path}: row group {group}"
      raise InputError(f"{place}: unreadable as parquet ({error})") from None


class ArrayRecord:
  """Records of an array-record file: plain text, JSON objects, or serialised tf.train.Example."""

  def __init__(self, key: str, path: Path, column: str):
    self._place, self._column = f"{key}: {path}", column
    self.size = path.stat().st_size
    try:
      self._source = grain.sources.ArrayRecordDataSource(str(path))
    except (OSError, RuntimeError, ValueError) as error:
      raise InputError(f"{self._place}: unreadable as array-record ({error})") from None

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, number: int) -> str:
    record = self._source[number]
    place = f"{self._place}: record {number}"
    if record[:1] == b"{":
      try:
        return _field(json.loads(record), self._column, place)
      except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}") from None
    features = _example(record)
    text = record if features is None else features.get(self._column)
    if text is None:
      raise InputError(_no_column(place, self._column, list(features or ())))
    try:
      return text.decode("utf-8")
    except UnicodeDecodeError as error:
      raise InputError(f"{place}: unreadable as UTF-8 text ({error})") from None


def _field(value: Any, column: str, place: str) -> str:
  if not isinstance(value, dict):
    raise InputError(f"{place}: expected a JSON object, got {type(value).__name__}")
  if column not in value:
    raise InputError(_no_column(place, column, list(value)))
  if not isinstance(value[column], str):
    raise InputError(f"{place}: {column} is {type(value[column]).__name__}, expected text")
  return value[column]


def _no_column(place: str, column: str, found: list[str]) -> str:
  hint = did_you_mean(column, found)
  return f"{place}: no field '{column}' (train_data_columns), it has {', '.join(found) or 'none'}{hint}"


def _example(record: bytes) -> dict[str, bytes] | None:
  """First bytes value of each feature of a serialised tf.train.Example; None when it is no such message."""
  try:
    features = {}
    for _, message in _messages(record):  # Example.features
      for _, entry in _messages(message):  # Features.feature, a map
        (_, name), (_, feature) = _messages(entry)
        for kind, values in _messages(feature):
          if kind == 1:  # BytesList
            features[name.decode("utf-8")] = next(iter(_messages(values)))[1]
    return features or None
  except (ValueError, StopIteration, UnicodeDecodeError):
    return None


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
  """Yields (field number, content) of the length-delimited fields that a protocol buffer consists of."""
  at = 0
  while at < len(data):
    tag, at = _varint(data, at)
    if tag & 7 != 2:
      raise ValueError("another wire type")
    length, at = _varint(data, at)
    if at + length > len(data):
      raise ValueError("past the end")
    yield tag >> 3, data[at : at + length]
    at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    if at >= len(data) or shift > 63:
      raise ValueError("no number")
    byte = data[at]
    value |= (byte & 0x7F) << shift
    at, shift = at + 1, shift + 7
    if byte < 0x80:
      return value, at
