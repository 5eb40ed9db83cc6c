"""What a person reads while a model trains: step, loss, tokens per second, time left."""

import sys
import time
from collections import deque

from tqdm import tqdm

LINES = 50  # about so many when nobody watches a bar
_BAR = "step {n}/{total} |{bar}| {postfix}"
_RECENT = 20  # steps that the speed is measured over


class Progress:
  """A bar on a terminal, lines elsewhere; both on stderr."""

  def __init__(self, steps: int, tokens_per_step: int):
    self._steps, self._tokens = steps, tokens_per_step
    self._times: deque[float] = deque(maxlen=_RECENT + 1)
    self._every = max(1, steps // LINES)
    self._bar: tqdm | None = None
    self.loss: float | None = None

  def step(self, number: int, loss: float) -> None:
    """Notes that 0-based step `number` is done, with its mean loss in nats."""
    self._times.append(time.monotonic())
    self.loss = loss
    if sys.stderr.isatty():
      if self._bar is None:
        self._bar = tqdm(total=self._steps, initial=number, dynamic_ncols=True, bar_format=_BAR)
      self._bar.set_postfix_str(self._line(number), refresh=False)
      self._bar.update(1)
    elif (number + 1) % self._every == 0 or number + 1 == self._steps:
      left = tqdm.format_interval((self._steps - number - 1) * self._seconds_per_step)
      speed = f"{self.tokens_per_second:,.0f} tokens/s"
      print(
        f"step {number + 1}/{self._steps}  loss {loss:.4f}  {speed}  {left} left", file=sys.stderr, flush=True
      )

  @property
  def _seconds_per_step(self) -> float:
    # from the end of the first step on, which compiles
    return (self._times[-1] - self._times[0]) / max(1, len(self._times) - 1)

  @property
  def tokens_per_second(self) -> float:
    """Speed over the last steps, padding counted."""
    return self._tokens / max(self._seconds_per_step, 1e-9)

  def close(self) -> None:
    """Leaves the bar as it is."""
    if self._bar is not None:
      self._bar.close()
