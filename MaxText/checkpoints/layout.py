"""Where a parameter lies in a decoder's tree, unrolled or scanned.

Name tables and stored checkpoints speak of layers by number; a model keeps them in lists or in stacks over
cycles.
"""

from collections.abc import Iterator, Mapping

import jax
from flax import nnx

from MaxText.models.kimi_k3 import KimiDecoder


class ParameterTree:
  """The parameters of one decoder by dotted path, e.g. `cycles.0.self_attn.q_proj.weight`.

  Attributes:
    model: the decoder itself.
    plan: how the depth is split.
    values: path -> array (or `jax.ShapeDtypeStruct` of an abstract model).
  """

  def __init__(self, model: KimiDecoder):
    self.model, self.plan = model, model.plan
    self._graph, state = nnx.split(model)
    self._variables = {".".join(map(str, keys)): (keys, var) for keys, var in nnx.to_flat_state(state)}
    self.values = {path: variable.get_value() for path, (_, variable) in self._variables.items()}

  def address(self, path: str) -> tuple[str, tuple[int, ...]]:
    """Turns `layers.{number}.rest` into (path in this tree, leading index); others stay."""
    if not path.startswith("layers."):
      return path, ()
    _, layer, rest = path.split(".", 2)
    part, index, row = self.plan.location(int(layer))
    return f"{part}.{index}.{rest}", () if row is None else (row,)

  def numbered(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields (numbered path, path in this tree, leading index) of every layer's parameters, and the rest."""
    inside: dict[str, list[str]] = {}
    for path in self.values:
      parts = path.split(".", 2)
      if parts[0] in ("layers", "cycles", "epilogue"):
        inside.setdefault(f"{parts[0]}.{parts[1]}", []).append(parts[2])
      else:
        yield path, path, ()
    for layer in range(len(self.plan.kinds)):
      part, index, row = self.plan.location(layer)
      for rest in inside[f"{part}.{index}"]:
        yield f"layers.{layer}.{rest}", f"{part}.{index}.{rest}", () if row is None else (row,)

  def merge(self, arrays: Mapping[str, jax.Array]) -> KimiDecoder:
    """Returns the decoder that holds `arrays`, one for every path of this tree."""
    flat = [(keys, variable.replace(arrays[path])) for path, (keys, variable) in self._variables.items()]
    return nnx.merge(self._graph, nnx.from_flat_state(flat))
