"""What a load gives back: the decoder, an account of the bytes, and how the source stored them."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import jax

from MaxText.checkpoints.manifest import Manifest
from MaxText.models.kimi_k3 import KimiDecoder


@dataclasses.dataclass(frozen=True)
class LoadReport:
  """What a load took from where.

  Attributes:
    source: the directory.
    bytes_by_dtype: bytes in the files by stored type, skipped tensors included; equal to the headers' totals.
    held_by_dtype: bytes of the parameters on local devices by their dtype.
    tensors: how many tensors were used.
    skipped: names of vision tensors, which the text decoder does not use.
    seconds: wall time.
  """

  source: str
  bytes_by_dtype: dict[str, int]
  held_by_dtype: dict[str, int]
  tensors: int
  skipped: tuple[str, ...]
  seconds: float

  def __str__(self) -> str:
    """One line for a log or a command's summary."""
    skipped = f", {len(self.skipped)} vision tensors skipped" if self.skipped else ""
    return (
      f"{self.source}: {self.tensors} tensors ({_totals(self.bytes_by_dtype)}){skipped}, "
      f"held as {_totals(self.held_by_dtype)}, {self.seconds:.1f} s"
    )


class Loaded(NamedTuple):
  """A decoder with its weights, what was read for it, and how the source stored it."""

  model: KimiDecoder
  report: LoadReport
  manifest: Manifest


def held_by_dtype(arrays: Iterable[jax.Array]) -> dict[str, int]:
  """Sums the bytes that `arrays` take on the devices of this process, by dtype."""
  held: Counter = Counter()
  for array in arrays:
    held[str(array.dtype)] += sum(shard.data.nbytes for shard in array.addressable_shards)
  return dict(held)


def _totals(by_dtype: dict[str, int]) -> str:
  return ", ".join(f"{dtype} {nbytes:,} B" for dtype, nbytes in sorted(by_dtype.items()))
