"""Draws the results of the inference microbenchmark; only that needs matplotlib, of the extra [plot]."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from MaxText.common.errors import InputError

FORMATS = (".png", ".svg", ".pdf")
_TAIL = "p90_in_ms"


def check_plot(path: Path) -> None:
  """Refuses a picture that could not be written, before anything is measured.

  Raises:
    InputError: matplotlib is not installed, or the ending names no format.
  """
  if path.suffix not in FORMATS:
    endings = ", ".join(FORMATS)
    raise InputError(f"inference_microbenchmark_plot_path: {path}: expected a name that ends in {endings}")
  if importlib.util.find_spec("matplotlib") is None:
    raise InputError(
      'inference_microbenchmark_plot_path: matplotlib is not installed; pip install "maxtext-kimi-k3[plot]"'
    )


def plot(results: Mapping[str, Any], path: Path) -> None:
  """Draws one panel for each kind of result that is there: median times, and the 90th percentile above.

  Args:
    results: of `Microbenchmark.run`.
    path: picture to write.
  """
  from matplotlib.figure import Figure

  sweep = results.get("sweep", {})
  panels = [
    ("prompt", "tokens", {name: results.get(name) for name in ("prefill", "insert")}, "time_in_ms"),
    ("decode step by batch", "requests", {"step": sweep.get("batch")}, "step_in_ms"),
    ("decode step by context", "tokens held", {"step": sweep.get("context")}, "step_in_ms"),
    ("one attention layer", "tokens held", _attention(sweep), "step_in_ms"),
  ]
  panels = [(*head, {k: v for k, v in curves.items() if v}, key) for *head, curves, key in panels]
  panels = [panel for panel in panels if panel[2]]
  figure = Figure(figsize=(4 * max(len(panels), 1), 3.4), layout="constrained")
  for number, (title, unit, curves, key) in enumerate(panels, 1):
    axes = figure.add_subplot(1, len(panels), number)
    for label, entries in curves.items():
      _draw(axes, label, entries, key)
    sizes = sorted({size for entries in curves.values() for size in entries})
    axes.set(title=title, xlabel=unit, ylabel="ms", xscale="log")
    axes.set_xticks(sizes, labels=map(str, sizes), minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
  where = results["environment"]
  figure.suptitle(f"{where['model_name']}, {where['dtype']}, {where['device']}", fontsize="medium")
  figure.savefig(path, dpi=120)


def _attention(sweep: Mapping[str, Any]) -> dict[str, Any]:
  return {kind: sweep.get("attention", {}).get(kind) for kind in ("kda", "mla")}


def _draw(axes: Any, label: str, entries: Mapping[int, Mapping[str, Any]], key: str) -> None:
  sizes = sorted(entries)
  middle = [entries[size][key] for size in sizes]
  above = [entries[size][_TAIL] - entries[size][key] for size in sizes]
  axes.errorbar(sizes, middle, yerr=[[0] * len(sizes), above], marker="o", capsize=3, label=label)
