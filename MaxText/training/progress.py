"""What a run tells: to a person step, loss, speed and time left; to a file every measurement."""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

LINES = 50  # about so many where nobody watches a bar
_RECENT = 20  # steps that the speed is measured over
_BAR = "step {n}/{total} |{bar:24}| {postfix}"


class Progress:
  """A bar on a terminal, lines elsewhere; both on stderr."""

  def __init__(self, steps: int, tokens_per_step: int):
    self._steps, self._tokens = steps, tokens_per_step
    self._drops = False  # whether it was told that rows are
    # from the end of the first step on: the first one compiles
    self._times: deque[float] = deque(maxlen=_RECENT + 1)
    self._every = max(1, steps // LINES)
    self._bar: tqdm | None = None

  def step(self, number: int, loss: float, dropped: int = 0) -> None:
    """Notes that 0-based step `number` is done.

    Args:
      number: of the step.
      loss: its mean, in nats.
      dropped: choices of an expert that no device had room for; the first are told, metrics.jsonl has all.
    """
    self._times.append(time.monotonic())
    if dropped and not self._drops:
      self._drops = True
      tqdm.write(
        f"step {number + 1}: {dropped:,} choices of an expert found no room (moe_capacity_factor); "
        "moe/dropped_rows in metrics.jsonl counts them",
        file=sys.stderr,
      )
    text = self._text(number, loss)
    if sys.stderr.isatty():
      if self._bar is None:
        self._bar = tqdm(total=self._steps, initial=number, bar_format=_BAR, dynamic_ncols=True)
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(1)
    elif len(self._times) == 1 or (number + 1) % self._every == 0 or number + 1 == self._steps:
      print(f"step {number + 1}/{self._steps}  {text}", file=sys.stderr, flush=True)

  def _text(self, number: int, loss: float) -> str:
    measured = len(self._times) - 1
    if not measured:
      return f"loss {loss:.4f}"
    seconds = max(self._times[-1] - self._times[0], 1e-9) / measured
    left = tqdm.format_interval((self._steps - number - 1) * seconds)
    return f"loss {loss:.4f}  {self._tokens / seconds:,.0f} tokens/s  {left} left"

  def close(self) -> None:
    """Leaves the bar as it is."""
    if self._bar is not None:
      self._bar.close()


class Record:
  """A file with one JSON object a line: `step`, counted from 0, and what was measured at it."""

  def __init__(self, path: Path | None):
    """Writes nothing yet; without a path nothing ever."""
    self._path = path
    self._begun = False

  def __call__(self, step: int, kind: str, measured: Mapping[str, Any]) -> None:
    """Adds a line; the first one takes the place of what an earlier run wrote of this step and later ones.

    Args:
      step: 0-based.
      kind: "train" or "eval".
      measured: name -> number; one that is not finite becomes null.
    """
    numbers = {name: float(value) for name, value in measured.items()}
    if kind == "eval":
      print(f"step {step + 1}  evaluation loss {numbers['eval/avg_loss']:.4f}", file=sys.stderr, flush=True)
    if self._path is None:
      return
    if not self._begun:
      self._forget(step)
      self._begun = True
    line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    with self._path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")

  def _forget(self, step: int) -> None:
    if self._path.is_file():
      lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
      # of a run that was killed, the last line may be torn
      kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
      partial = self._path.with_name(f"{self._path.name}.partial")
      partial.write_text("".join(kept), encoding="utf-8")
      partial.replace(self._path)
