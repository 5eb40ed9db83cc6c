"""Repeated measurements and what is reported of them: median, spread, and ratios within one run."""

import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class Rate:
  """Tokens per second over several repeats.

  Attributes:
    tokens: tokens of one repeat, all rows together.
    seconds: time of each repeat.
  """

  tokens: int
  seconds: tuple[float, ...]

  @property
  def median(self) -> float:
    """Median tokens per second."""
    return self.tokens / statistics.median(self.seconds)

  def report(self) -> dict[str, float]:
    """Median, lowest and highest tokens per second, rounded for a JSON line."""
    lowest, highest = self.tokens / max(self.seconds), self.tokens / min(self.seconds)
    return {"median": round(self.median, 2), "min": round(lowest, 2), "max": round(highest, 2)}


def ratio(ours: Rate, theirs: Rate) -> float:
  """How many times faster we are, by the medians of one run."""
  return ours.median / theirs.median
