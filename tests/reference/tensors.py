"""Reads and writes the safetensors format with NumPy alone, one tensor at a time.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "U8": np.dtype(np.uint8),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorPlan:
  """A tensor that is drawn only when its bytes are written.

  Attributes:
    name: published name.
    shape: published shape.
    dtype: stored dtype.
    draw: returns the values, in any dtype that casts to `dtype`.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  draw: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Bytes on disk."""
    return int(np.prod(self.shape)) * self.dtype.itemsize


def read_file(path: Path) -> dict[str, np.ndarray]:
  """Maps every tensor of one file, without reading its bytes yet."""
  with open(path, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
  header.pop("__metadata__", None)
  data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
  tensors = {}
  for name, entry in header.items():
    start, end = entry["data_offsets"]
    tensors[name] = data[start:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
  return tensors


def read_directory(directory: Path) -> dict[str, np.ndarray]:
  """Maps every tensor of every safetensors file of `directory`."""
  tensors = {}
  for path in sorted(Path(directory).glob("*.safetensors")):
    tensors |= read_file(path)
  return tensors


def write_file(path: Path, plans: Iterable[TensorPlan]) -> None:
  """Writes `plans` in order; no more than one tensor is in memory at a time."""
  plans, header, offset = list(plans), {}, 0
  for plan in plans:
    span = [offset, offset + plan.nbytes]
    header[plan.name] = {"dtype": NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": span}
    offset = span[1]
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for plan in plans:
      values = np.ascontiguousarray(plan.draw(), dtype=plan.dtype)
      if values.shape != plan.shape:
        raise ValueError(f"{plan.name}: drew {values.shape}, planned {plan.shape}")
      file.write(values.tobytes())


def write_directory(directory: Path, plans: Iterable[TensorPlan], shards: int) -> None:
  """Writes `plans` as one file, or as `shards` files of about equal size with an index."""
  plans, directory = list(plans), Path(directory)
  if shards == 1:
    return write_file(directory / "model.safetensors", plans)
  total = sum(plan.nbytes for plan in plans)
  parts = [[] for _ in range(shards)]
  done = 0
  for plan in plans:
    parts[min(shards - 1, done * shards // total)].append(plan)
    done += plan.nbytes
  weight_map = {}
  for number, part in enumerate(parts, start=1):
    name = f"model-{number:05d}-of-{shards:05d}.safetensors"
    write_file(directory / name, part)
    weight_map |= {plan.name: name for plan in part}
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
