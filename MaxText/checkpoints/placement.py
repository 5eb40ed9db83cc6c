"""Moves host buffers to devices: whole, or the slices that a sharding gives to this process's devices.

One parameter is in flight at a time, so the peak of a load is what it keeps and one parameter more.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

_ALIGNMENT = 64  # a host buffer on this boundary becomes a CPU array without a copy
Region = tuple[slice, ...]
Fill = Callable[[Region], np.ndarray]


def place_all(
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  fill_of: Callable[[str], Fill],
  shardings: Any = None,
  progress: bool = True,
) -> dict[str, jax.Array]:
  """Builds every parameter in the order of `shapes`, under a progress bar of bytes.

  Args:
    shapes: dotted path -> shape and dtype.
    fill_of: path -> function from a slice of that parameter to a host buffer with its values.
    shardings: state of the decoder with a `jax.sharding.Sharding` for each parameter, or a mapping from
      dotted path to sharding; parameters that it lacks, or all when None, go whole to the default device.
      A loader also takes a function from the abstract decoder that it fills to such a mapping.
    progress: draw the bar on a terminal.
  """
  by_path = sharding_by_path(shardings)
  sizes = {path: _held_bytes(shape, by_path.get(path)) for path, shape in shapes.items()}
  arrays: dict[str, jax.Array] = {}
  with progress_bar(sum(sizes.values()), "loading", progress) as bar:
    for path, shape in shapes.items():
      arrays[path] = place(fill_of(path), shape, by_path.get(path)).block_until_ready()
      bar.update(sizes[path])
  return arrays


def sharding_by_path(shardings: Any) -> Mapping[str, jax.sharding.Sharding]:
  """Returns dotted path -> sharding of a state of shardings (or of such a mapping itself)."""
  if shardings is None or isinstance(shardings, dict):
    return shardings or {}
  flat = nnx.to_flat_state(shardings)
  return {
    ".".join(map(str, keys)): getattr(leaf, "get_value", lambda leaf=leaf: leaf)() for keys, leaf in flat
  }


def place(fill: Fill, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None) -> jax.Array:
  """Builds an array from `fill(region) -> host buffer`, asked once for each distinct slice held here."""
  if sharding is None:
    return jax.device_put(fill(tuple(slice(0, n) for n in shape.shape)))
  regions = sharding.addressable_devices_indices_map(shape.shape)
  parts: dict[Any, jax.Array] = {}
  for region, devices in _by_region(regions, shape.shape):
    buffer = fill(region)
    parts |= {device: jax.device_put(buffer, device).block_until_ready() for device in devices}
  return jax.make_array_from_single_device_arrays(
    shape.shape, sharding, [parts[device] for device in regions]
  )


def host_buffer(sizes: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Returns an uninitialised array that a CPU device can take over without a copy."""
  dtype = np.dtype(dtype)
  nbytes = math.prod(sizes) * dtype.itemsize
  raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + nbytes].view(dtype).reshape(sizes)


def progress_bar(total: int, what: str, shown: bool) -> tqdm:
  """Returns a byte counter on stderr, silent unless `shown` and stderr is a terminal."""
  shown = shown and sys.stderr.isatty()
  return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not shown, file=sys.stderr)


def _by_region(regions: Mapping[Any, Any], shape: tuple[int, ...]) -> Iterator[tuple[Region, list[Any]]]:
  """Groups devices by the slice that they hold, as slices with explicit bounds."""
  groups: dict[tuple, list[Any]] = {}
  for device, index in regions.items():
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
    groups.setdefault(bounds, []).append(device)
  for bounds, devices in groups.items():
    yield tuple(slice(start, stop) for start, stop in bounds), devices


def _held_bytes(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None) -> int:
  if sharding is None:
    return math.prod(shape.shape) * shape.dtype.itemsize
  devices = len(sharding.addressable_devices)
  return devices * math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
