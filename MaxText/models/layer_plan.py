"""Where each decoder layer lives: unrolled in a list, or in a prologue, scanned cycles and an epilogue.

K3's 93 layers become a prologue of one 4-layer cycle (it holds the dense layer), 22 scanned cycles, and one
layer behind them. The same search serves any layer pattern.
"""

import dataclasses
from typing import Literal

from MaxText.configs.schema import Config, LayerKind, MlpKind

Part = Literal["layers", "cycles", "epilogue"]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
  """Split of the depth.

  Attributes:
    kinds: (attention, feed-forward) kind of each layer.
    start: first scanned layer; the layers before it are unrolled.
    period: layers in one cycle.
    repeats: scanned cycles; 0 when the whole depth is unrolled.
  """

  kinds: tuple[tuple[LayerKind, MlpKind], ...]
  start: int
  period: int
  repeats: int

  @property
  def scanned_end(self) -> int:
    """First layer of the epilogue."""
    return self.start + self.period * self.repeats

  def location(self, layer: int) -> tuple[Part, int, int | None]:
    """Returns (part, index in the part, row of the stack or None) of 0-based `layer`."""
    if layer < self.start:
      return "layers", layer, None
    if layer < self.scanned_end:
      row, position = divmod(layer - self.start, self.period)
      return "cycles", position, row
    return "epilogue", layer - self.scanned_end, None


def layer_plan(cfg: Config, scan: bool) -> LayerPlan:
  """Chooses the split that scans the most layers, then the shortest cycle, then the latest start.

  Args:
    cfg: states the kind of every layer.
    scan: whether to scan at all; without it every layer is in `layers`.
  """
  kinds = tuple((cfg.layer_kind(i), cfg.mlp_kind(i)) for i in range(cfg.base_num_decoder_layers))
  depth = len(kinds)
  plans = [LayerPlan(kinds, depth, 1, 0)]
  if scan:
    for period in range(1, depth // 2 + 1):
      for start in range(depth - 2 * period + 1):
        repeats = _repeats(kinds, start, period)
        if repeats >= 2:
          plans.append(LayerPlan(kinds, start, period, repeats))
  return max(plans, key=lambda plan: (plan.period * plan.repeats, -plan.period, plan.start))


def _repeats(kinds: tuple, start: int, period: int) -> int:
  """How often the `period` kinds from `start` on follow one another."""
  same = start + period
  while same < len(kinds) and kinds[same] == kinds[same - period]:
    same += 1
  return (same - start) // period
