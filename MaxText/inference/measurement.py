"""What a measurement is reported with: its samples, the machine it ran on, and the memory that was in use."""

import datetime
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

PERCENTILES = (50, 90, 99)
_DISTRIBUTION, _PACKAGE = "maxtext-kimi-k3", Path(__file__).parents[1]
_MEMORY = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")


def clocked[Result](
  wait: Callable[[], object], function: Callable[..., Result], *arguments: Any
) -> tuple[float, Result]:
  """Returns the seconds from a call of `function` until `wait` returns, and what the call returned.

  Whatever was asked for before is waited for first.
  """
  wait()
  start = time.perf_counter()
  result = function(*arguments)
  wait()
  return time.perf_counter() - start, result


def distribution(seconds: Sequence[float]) -> dict[str, Any]:
  """Returns percentiles (between two samples, linear), mean, extremes and the samples themselves, in ms."""
  samples = 1e3 * np.asarray(seconds, np.float64)
  percentiles = {f"p{p}_in_ms": float(np.percentile(samples, p)) for p in PERCENTILES}
  return percentiles | {
    "mean_in_ms": float(np.mean(samples)),
    "min_in_ms": float(np.min(samples)),
    "max_in_ms": float(np.max(samples)),
    "samples_in_ms": samples.tolist(),
  }


def flattened(results: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Yields every single value by the names on the way to it, joined by "_"; lists of samples stay out."""
  for key, value in results.items():
    name = f"{prefix}_{key}" if prefix else str(key)
    if isinstance(value, Mapping):
      yield from flattened(value, name)
    elif not isinstance(value, list):
      yield name, value


def device_memory() -> list[dict[str, Any]]:
  """Returns bytes in use, their peak and limit on each local device; None, and why, where it is mute."""
  reports = []
  for device in jax.local_devices():
    stats = device.memory_stats()
    report: dict[str, Any] = {"device": str(device)}
    report |= {key: (stats or {}).get(key) for key in _MEMORY}
    if stats is None:
      report["reason"] = f"the {device.platform} backend reports no memory statistics"
    reports.append(report)
  return reports


def surroundings() -> dict[str, Any]:
  """Returns when, on what and with which versions a measurement is made."""
  device = jax.devices()[0]
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "machine": platform.machine(),
    "platform": device.platform,
    "device": device.device_kind,
    "device_count": jax.device_count(),
    "jax": jax.__version__,
    "version": _version(),
    "git": _revision(),
    # programs that an earlier run left on disk are read, not compiled: their compile time is none
    "keeps_compiled_programs": jax.config.jax_compilation_cache_dir is not None,
  }


def _version() -> str | None:
  try:
    return importlib.metadata.version(_DISTRIBUTION)
  except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
    return None


def _revision() -> str | None:
  """The commit of the checkout, with a + where files were changed; None outside one."""
  git = lambda *words: subprocess.run(
    ["git", "-C", str(_PACKAGE), *words], capture_output=True, text=True, check=True
  ).stdout.strip()
  try:
    if (
      Path(git("rev-parse", "--show-toplevel")) != _PACKAGE.parent
    ):  # another project's, around an installation
      return None
    return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--", str(_PACKAGE)))
  except (OSError, subprocess.CalledProcessError):
    return None
