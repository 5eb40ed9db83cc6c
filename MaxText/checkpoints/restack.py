"""Fills the parameters of one layout from the stored arrays of another, on the host.

Layers may be stacked here and single there; experts packed here and plain there, or rounded on the way.
"""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.placement import Fill, Region, host_buffer
from MaxText.kernels.mxfp4 import MxFp4, pack, unpack
from MaxText.layers.latent_moe import EXPERT_MATRICES

View = Literal["same", "unpacked", "rounded", "packed", "scale"]

_EXPERTS = tuple(f".experts.{name}" for name in EXPERT_MATRICES)
_BATCH_BYTES = 1 << 30  # of stored arrays on the host at a time


class Piece(NamedTuple):
  """One stored array (or a packed pair), or one row of its stack, whose `view` fills `parameter[lead]`."""

  stored: tuple[str, ...]
  row: tuple[int, ...]
  lead: tuple[int, ...]
  view: View


def pieces(tree: ParameterTree, stored: ParameterTree, rounds: bool) -> dict[str, list[Piece]]:
  """Says for each parameter of `tree` which stored arrays, or rows of them, fill it.

  Args:
    tree: what is filled.
    stored: what there is.
    rounds: plain experts are rounded to MXFP4, and stay plain where `tree` has them plain.
  """
  places = {name: (path, row) for name, path, row in stored.numbered()}
  found: dict[str, list[Piece]] = {path: [] for path in tree.values}
  for name, path, lead in tree.numbered():
    parts, view = _source(name, places.keys())
    if rounds and view == "same" and name.endswith(_EXPERTS):
      view = "rounded"
    stacks = tuple(places[part][0] for part in parts)
    found[path].append(Piece(stacks, places[parts[0]][1], lead, view))
  return found


def _source(name: str, stored: Collection[str]) -> tuple[tuple[str, ...], View]:
  """Returns the stored arrays that fill a parameter, and how: experts may be packed there and plain here."""
  if name in stored:
    return (name,), "same"
  if f"{name}_packed" in stored:
    return (f"{name}_packed", f"{name}_scale"), "unpacked"
  stem, _, half = name.rpartition("_")
  return (stem,), "packed" if half == "packed" else "scale"


def _viewed(view: View, found: list[np.ndarray], dtype: Any) -> np.ndarray:
  if view == "same":
    return found[0]
  codes = MxFp4(*found) if view == "unpacked" else pack(found[0])
  return getattr(codes, view) if view in ("packed", "scale") else unpack(codes, dtype)


class Restacker:
  """Returns the function that fills a parameter, for one after the other.

  Arrays are read in batches: one by one is slow, all at once would hold the model twice.

  Attributes:
    shapes: path -> shape of every parameter, in the order in which they have to be asked for.
  """

  def __init__(
    self,
    read: Callable[[list[str]], dict[str, np.ndarray]],
    stored: dict[str, jax.ShapeDtypeStruct],
    found: dict[str, list[Piece]],
    shapes: dict[str, Any],
  ):
    """Reads nothing yet.

    Args:
      read: returns some of the stored arrays.
      stored: path -> shape and dtype of them all.
      found: from `pieces`.
      shapes: path -> shape and dtype of every parameter.
    """
    self._read, self._stored, self._pieces = read, stored, found
    # as the archive is laid out, so that a stack is read once and its rows handed out
    self.shapes = {path: shapes[path] for path in sorted(shapes, key=lambda path: found[path][0])}
    self._waiting = list(self.shapes)
    self._arrays: dict[str, np.ndarray] = {}

  def __call__(self, path: str) -> Fill:
    """Returns the function from a slice of parameter `path` to a host buffer."""
    if any(name not in self._arrays for piece in self._pieces[path] for name in piece.stored):
      self._arrays.clear()
      self._arrays = self._read(self._next_batch(path))
    return partial(self._fill, path)

  def _next_batch(self, path: str) -> list[str]:
    self._waiting = self._waiting[self._waiting.index(path) :]
    names: dict[str, None] = {}
    size = 0
    for waiting in self._waiting:
      wanted = [n for piece in self._pieces[waiting] for n in piece.stored if n not in names]
      size += sum(nbytes(self._stored[name]) for name in wanted)
      if names and size > _BATCH_BYTES:
        break
      names |= dict.fromkeys(wanted)
    return list(names)

  def _fill(self, path: str, region: Region) -> np.ndarray:
    dtype = self.shapes[path].dtype
    buffer = host_buffer(tuple(part.stop - part.start for part in region), dtype)
    for piece in self._pieces[path]:
      if all(part.start <= i < part.stop for i, part in zip(piece.lead, region)):
        at = tuple(i - part.start for i, part in zip(piece.lead, region))
        *outer, last = region[len(piece.lead) :] or (...,)
        # blocks of MXFP4 run along the last axis, which is cut when they are whole numbers again
        found = [self._arrays[name][piece.row or ...][*outer, ...] for name in piece.stored]
        buffer[at or ...] = _viewed(piece.view, found, dtype)[..., last]
    return buffer


def nbytes(shape: jax.ShapeDtypeStruct) -> int:
  """Returns the bytes of an array of this shape and dtype."""
  return math.prod(shape.shape) * shape.dtype.itemsize
