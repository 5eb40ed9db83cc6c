"""Draws the loss of a training run: each step and the mean of 20.

    python scripts/plot_loss.py RUN PICTURE.png      needs the extra [plot]

RUN is the directory of a run, with its metrics.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from MaxText.common import command
from MaxText.common.errors import InputError

WINDOW = 20  # steps of the mean


def losses(path: Path) -> tuple[np.ndarray, np.ndarray]:
  """Reads [N] steps, counted from 1, and [N] losses in nats a token; of a step that ran twice, the later one.

  Raises:
    InputError: the file is missing, or has no step.
  """
  try:
    lines = path.read_text(encoding="utf-8").splitlines()
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from None
  entries = {}
  for entry in map(json.loads, filter(str.strip, lines)):
    if "learning/lm_loss" in entry:
      entries[int(entry["step"]) + 1] = entry["learning/lm_loss"]
  if not entries:
    raise InputError(f"{path}: no step in it, expected lines with step and learning/lm_loss")
  steps = sorted(entries)
  return np.array(steps), np.array([entries[step] for step in steps])


def plot(arguments: Sequence[str]) -> int:
  """Writes the picture."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("run", type=Path, help="directory of a run")
  parser.add_argument("picture", type=Path, help="file to write; its ending chooses the format")
  args = parser.parse_args(arguments)
  steps, values = losses(args.run / "metrics.jsonl")
  try:
    import matplotlib.pyplot as plt
  except ImportError:
    raise InputError("matplotlib is not installed; pip install '.[plot]' brings it") from None
  figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
  axes.plot(steps, values, color="0.8", linewidth=0.8, label="step")
  if len(values) >= WINDOW:
    mean = np.convolve(values, np.ones(WINDOW) / WINDOW, "valid")
    axes.plot(steps[WINDOW - 1 :], mean, label=f"mean of {WINDOW} steps")
  axes.set(xlabel="step", ylabel="training loss (nats a token)")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(args.picture, dpi=120)
  return 0


if __name__ == "__main__":
  sys.exit(command.run(plot, None))
