"""Reads a published directory into a decoder.

Every parameter is one host buffer, filled tensor by tensor from mapped files, moved to its devices and
dropped before the next: the peak is the parameters kept, one of them twice at most, and one mapped tensor.
With shardings, each buffer is only the slice that a local device holds, and only tensors that touch it are
read.
Source: docs/architecture.md.
"""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from MaxText.checkpoints import names
from MaxText.checkpoints.accounting import APadding, describe, match
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.names import U8, TensorSpec
from MaxText.checkpoints.placement import Region, host_buffer, place_all
from MaxText.checkpoints.reader import PublishedFiles, open_published
from MaxText.checkpoints.report import Loaded, LoadReport, held_by_dtype
from MaxText.common.errors import CheckpointError
from MaxText.configs.schema import Config
from MaxText.kernels.mxfp4 import BLOCK, MxFp4, unpack
from MaxText.models import registry


class Source(NamedTuple):
  """A tensor (or a packed pair) that fills `parameter[lead]`."""

  tensors: tuple[str, ...]
  view: str
  lead: tuple[int, ...]


def load_published(
  directory: str | Path,
  cfg: Config,
  *,
  mesh_shardings: Any = None,
  progress: bool = True,
  a_log_padding: APadding = "auto",
) -> Loaded:
  """Loads a published checkpoint, every tensor of it exactly once.

  Args:
    directory: single or indexed safetensors in the published layout.
    cfg: the architecture, and the dtypes to hold. Experts stay packed only where the file packs all of them.
    mesh_shardings: what each parameter is split like, as in `placement.place_all`.
    progress: draw a progress bar on a terminal.
    a_log_padding: see `accounting.describe`.

  Raises:
    CheckpointError: damaged files, or tensors that do not fit `cfg`.
  """
  started = time.monotonic()
  files = open_published(directory)
  prefix, specs = match(files, cfg)
  manifest = describe(files, cfg, prefix, specs, a_log_padding)
  cfg = stored_experts(cfg, all(s.dtype == U8 for s in specs if ".experts." in s.name))
  tree = ParameterTree(registry.abstract(cfg))
  sources = _sources(tree, specs)
  fillers = {path: _Filler(files, cfg, sources[path], shape.dtype) for path, shape in tree.values.items()}
  shardings = mesh_shardings(tree.model) if callable(mesh_shardings) else mesh_shardings
  arrays = place_all(tree.values, fillers.__getitem__, shardings, progress)
  report = LoadReport(
    source=str(files.directory),
    bytes_by_dtype=files.bytes_by_dtype(),
    held_by_dtype=held_by_dtype(arrays.values()),
    tensors=len(specs),
    skipped=tuple(sorted(files.skipped)),
    seconds=time.monotonic() - started,
  )
  return Loaded(tree.merge(arrays), report, manifest)


def stored_experts(cfg: Config, packed: bool) -> Config:
  """Returns `cfg` with experts that stay plain where they are not all `packed`, or to be packed."""
  return cfg if packed or not cfg.packs_experts else cfg.model_copy(update={"expert_weights": "dequantized"})


def _sources(tree: ParameterTree, specs: list[TensorSpec]) -> dict[str, list[Source]]:
  """Inverts the table: parameter path -> what fills it, checked to fill each element exactly once."""
  sources: dict[str, list[Source]] = {path: [] for path in tree.values}
  for spec in specs:
    for place in spec.places:
      path, row = tree.address(place.path)
      tensors, view = (spec.name,), place.view
      if path not in sources and path.endswith("_scale"):
        continue  # a plain parameter reads the scale together with its codes
      if path not in sources and path.endswith("_packed"):
        path, view = path.removesuffix("_packed"), "mxfp4"
        tensors = (spec.name, spec.name.removesuffix("_packed") + "_scale")
      if path not in sources:
        raise CheckpointError(f"{spec.name}: the decoder has no parameter {path}")
      sources[path].append(Source(tensors, view, row + place.lead))
  for path, found in sources.items():
    _check_filled_once(path, tree.values[path].shape, [source.lead for source in found])
  return sources


def _check_filled_once(path: str, shape: tuple[int, ...], leads: list[tuple[int, ...]]) -> None:
  depth = len(leads[0]) if leads else 0
  expected = math.prod(shape[:depth])
  if len(leads) != expected or len(set(leads)) != expected:
    raise CheckpointError(f"parameter {path} {list(shape)}: {len(leads)} tensors for {expected} places")


class _Filler:
  """Fills host buffers with any slice of one parameter."""

  def __init__(self, files: PublishedFiles, cfg: Config, sources: list[Source], dtype: np.dtype):
    self.files, self.cfg, self.sources, self.dtype = files, cfg, sources, dtype

  def __call__(self, region: Region) -> np.ndarray:
    buffer = host_buffer(tuple(s.stop - s.start for s in region), self.dtype)
    for source in self.sources:
      depth = len(source.lead)
      if all(s.start <= i < s.stop for i, s in zip(source.lead, region)):
        target = buffer[tuple(i - s.start for i, s in zip(source.lead, region)) or ...]
        values = self._read(source, region[depth:])
        if values.shape != target.shape:  # NumPy would broadcast
          raise CheckpointError(
            f"{source.tensors[0]}: gives {values.shape}, the decoder holds {target.shape}"
          )
        target[...] = values
    return buffer

  def _read(self, source: Source, region: Region) -> np.ndarray:
    if source.view == "mxfp4":
      return self._unpack(source, *region)
    array = self.files.array(source.tensors[0])
    values = names.view(source.view, array, self.cfg)[region]
    if source.tensors[0].endswith(".weight_scale"):
      _check_scale(source.tensors[0], values)
    return values

  def _unpack(self, source: Source, rows: slice, columns: slice) -> np.ndarray:
    first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
    packed_name, scale_name = source.tensors
    scale = self.files.array(scale_name)[rows, first:last]
    _check_scale(scale_name, scale)
    packed = self.files.array(packed_name)[rows, first * BLOCK // 2 : last * BLOCK // 2]
    offset = first * BLOCK
    return unpack(MxFp4(packed, scale), self.dtype)[:, columns.start - offset : columns.stop - offset]


def _check_scale(name: str, scale: np.ndarray) -> None:
  """Refuses the NaN byte, which no published tensor holds and which would poison every token."""
  if (scale == 255).any():
    where = [int(i) for i in np.argwhere(scale == 255)[0]]
    raise CheckpointError(f"{name}: scale byte 255 (NaN) at {where}")
