"""Writes a decoder as a published directory, byte for byte what it was read from.

The tables of `names.py` are walked the other way: a tensor is an empty array of the published shape whose
views are filled from the parameters. Files are laid out as the safetensors library does, one tensor in memory
at a time.
Source: spec 3, 3.1, 9-D7; docs/architecture.md.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from MaxText.checkpoints import names
from MaxText.checkpoints.directory import write_companions
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.manifest import Manifest, stored_form
from MaxText.checkpoints.names import U8, TensorSpec, expected_tensors
from MaxText.checkpoints.placement import progress_bar
from MaxText.checkpoints.reader import DTYPES, INDEX_FILE, SINGLE_FILE
from MaxText.checkpoints.staging import staged
from MaxText.configs.schema import Config
from MaxText.kernels.mxfp4 import MxFp4, pack, unpack
from MaxText.models.adapters import merged
from MaxText.models.kimi_k3 import KimiDecoder

_STORED_AS = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_ORDER = {"F32": 0, "BF16": 1, "F16": 2, "U8": 3}  # the library lays wide types first, then sorts by name


def save_published(
  model: KimiDecoder,
  cfg: Config,
  directory: str | Path,
  *,
  manifest: Manifest | None = None,
  weight_dtype: str | None = None,
  companions: str | Path | None = None,
  overwrite: bool = False,
  max_shard_bytes: int = 5_000_000_000,
  progress: bool = True,
) -> None:
  """Writes `config.json` and safetensors that any loader of the published models reads.

  Args:
    model: the decoder, scanned or unrolled; what adapters add is folded into its weights.
    cfg: its configuration; `published_extra` brings back the keys that the model does not read.
    directory: absent or empty, unless `overwrite`. Appears whole or not at all.
    manifest: how the source stored its tensors (`load(...).manifest`); with it and unchanged weights every
      tensor has the source's bytes. Without it the release's names and shapes are written, in the types that
      the model holds.
    weight_dtype: "float32" or "bfloat16" for matrices and norms, over what the manifest or the model says.
    companions: directory to copy tokenizer and generation files from.
    overwrite: replace what `directory` holds.
    max_shard_bytes: start another shard, with an index, rather than exceed this.
    progress: draw a progress bar on a terminal.

  Raises:
    CheckpointError: `directory` holds something, or cannot be written.
  """
  export = _Export(model, cfg, manifest, weight_dtype)
  with staged(directory, overwrite, sum(map(nbytes, export.specs))) as partial:
    write_companions(partial, cfg, companions)
    shards = _shards(export.specs, max_shard_bytes)
    with progress_bar(sum(map(nbytes, export.specs)), "writing", progress) as bar:
      for name, specs in shards.items():
        with (partial / name).open("wb") as file:
          _write_file(file, export, specs, bar)
    if len(shards) > 1:
      _write_index(partial / INDEX_FILE, shards)


def nbytes(spec: TensorSpec) -> int:
  """Returns the stored size of a tensor in bytes."""
  return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


class _Export:
  """The published tensors of one decoder, made one at a time.

  Attributes:
    specs: every tensor in its stored type and shape.
    metadata: `__metadata__` of the files.
  """

  def __init__(self, model: KimiDecoder, cfg: Config, manifest: Manifest | None, weight_dtype: str | None):
    self.cfg, self.tree = cfg, ParameterTree(merged(model))
    self.manifest = manifest or Manifest.published(cfg)
    self.metadata = self.manifest.metadata
    self._weight_dtype = _STORED_AS[np.dtype(weight_dtype)] if weight_dtype else None
    self._follows_model = manifest is None
    self._last_pack: tuple[str, Any] = ("", None)
    specs = expected_tensors(cfg, self.manifest.prefix, lambda stem: self.manifest.packed(stem, cfg))
    self.specs = [self._as_stored(spec) for spec in specs]

  def _as_stored(self, spec: TensorSpec) -> TensorSpec:
    dtype, shape = stored_form(spec, self.manifest)
    if spec.dtype == names.MATRIX:
      if self._weight_dtype:
        dtype = self._weight_dtype
      elif self._follows_model:
        path, _ = self.tree.address(spec.places[0].path)
        held = self.tree.values.get(path)  # None where packed bytes are written out as plain numbers
        dtype = _STORED_AS[np.dtype(held.dtype)] if held is not None else dtype
    return spec._replace(dtype=dtype, shape=shape)

  def tensor(self, spec: TensorSpec) -> np.ndarray:
    """Returns the array of `spec`, in its stored type and shape."""
    path, row = self.tree.address(spec.places[0].path)
    if path not in self.tree.values:
      lead = row + spec.places[0].lead
      return self._packed(spec, path, lead) if spec.dtype == U8 else self._plain(spec, path, lead)
    array = np.zeros(spec.shape, DTYPES[spec.dtype])
    for place in spec.places:
      path, row = self.tree.address(place.path)
      names.view(place.view, array, self.cfg)[...] = self._values(path, row + place.lead)
    if tail := bytes.fromhex(self.manifest.a_log_tails.get(spec.name, "")):
      array.reshape(-1)[self.cfg.kda_num_heads :] = np.frombuffer(tail, array.dtype)
    return array

  def _values(self, path: str, lead: tuple[int, ...]) -> np.ndarray:
    return np.asarray(self.tree.values[path])[lead or ...]

  def _plain(self, spec: TensorSpec, path: str, lead: tuple[int, ...]) -> np.ndarray:
    experts = MxFp4(self._values(f"{path}_packed", lead), self._values(f"{path}_scale", lead))
    return unpack(experts, DTYPES[spec.dtype])

  def _packed(self, spec: TensorSpec, path: str, lead: tuple[int, ...]) -> np.ndarray:
    stem, _, part = path.rpartition("_")
    key = f"{stem}{lead}"
    if self._last_pack[0] != key:  # codes and scale of one matrix stand together in a file
      self._last_pack = key, pack(self._values(stem, lead))
    return getattr(self._last_pack[1], part)


def _shards(specs: list[TensorSpec], limit: int) -> dict[str, list[TensorSpec]]:
  groups: list[list[TensorSpec]] = [[]]
  size = 0
  for spec in specs:
    if groups[-1] and size + nbytes(spec) > limit:
      groups.append([])
      size = 0
    groups[-1].append(spec)
    size += nbytes(spec)
  if len(groups) == 1:
    return {SINGLE_FILE: groups[0]}
  return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_file(file: BinaryIO, export: _Export, specs: list[TensorSpec], bar: Any) -> None:
  specs = sorted(specs, key=lambda spec: (_ORDER[spec.dtype], spec.name))
  header: dict[str, Any] = {"__metadata__": export.metadata} if export.metadata else {}
  start = 0
  for spec in specs:
    end = start + nbytes(spec)
    header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    start = end
  text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
  text += b" " * (-len(text) % 8)
  file.write(struct.pack("<Q", len(text)) + text)
  for spec in specs:
    array = export.tensor(spec)
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    bar.update(array.nbytes)


def _write_index(path: Path, shards: dict[str, list[TensorSpec]]) -> None:
  weight_map = {spec.name: shard for shard, specs in shards.items() for spec in specs}
  total = sum(nbytes(spec) for specs in shards.values() for spec in specs)
  text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
  path.write_text(text + "\n", encoding="utf-8")
