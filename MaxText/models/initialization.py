"""Initial weights of a decoder, drawn from the initializers that its parameters carry. Source: spec 2.10.

Random bits are slow to compile: a program with one draw per parameter took half a minute for nine layers.
So small parameters that share an initializer are cut out of one long draw, in the order of their layers'
numbers and their names. A large one is drawn alone, so that it can be born in the shards of its devices.
Either way a scanned and an unrolled stack begin with the same weights.
"""

import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.models.layer_plan import LayerPlan

_SMALL = 1 << 20  # elements of one layer's share


class _Share(NamedTuple):
  """What one layer has of a parameter: its name, the parameter's index, the row of its stack or None."""

  name: str
  index: int
  row: int | None


def draw(decoder: nnx.Module, key: jax.Array) -> nnx.Module:
  """Returns `decoder` with freshly drawn weights; works inside and outside of `jax.jit`.

  Args:
    decoder: abstract, as `registry.abstract` returns it.
    key: random key; equal keys give equal weights, however the depth is split.
  """
  graph, state = nnx.split(decoder)
  flat = nnx.to_flat_state(state)
  shares = sorted(
    share for index, (path, _) in enumerate(flat) for share in _shares(path, index, decoder.plan)
  )
  small: dict[tuple[Any, ...], list[_Share]] = {}
  large: dict[int, list[_Share]] = {}
  for share in shares:
    variable = flat[share.index][1]
    if math.prod(_shape(variable, share)) > _SMALL:
      large.setdefault(share.index, []).append(share)
    else:
      small.setdefault((variable.get_metadata("init"), variable.get_value().dtype), []).append(share)
  rows: dict[int, Any] = {}
  for number, ((init, dtype), members) in enumerate(small.items()):
    shapes = [_shape(flat[share.index][1], share) for share in members]
    for share, value in zip(members, _cut(init, dtype, shapes, jax.random.fold_in(key, number))):
      rows.setdefault(share.index, []).append(value)
  for index, members in large.items():
    rows[index] = _drawn_alone(flat[index][1], members, key)
  stacked = lambda path, values: jnp.asarray(values) if path[0] == "cycles" else values[0]
  drawn = [(path, var.replace(stacked(path, rows[index]))) for index, (path, var) in enumerate(flat)]
  return nnx.merge(graph, nnx.from_flat_state(drawn))


def _cut(init, dtype, shapes, key) -> list[jax.Array]:
  """Values of the given shapes, cut out of one draw; a single one is drawn in its own shape."""
  if len(shapes) == 1:
    return [init(key, shapes[0], dtype)]
  sizes = [math.prod(shape) for shape in shapes]
  values, start, parts = init(key, (sum(sizes),), dtype), 0, []
  for shape, size in zip(shapes, sizes):
    parts.append(values[start : start + size].reshape(shape))
    start += size
  return parts


def _drawn_alone(variable, members, key) -> jax.Array:
  """Values of all rows of one parameter, each from a key of its own, in one draw."""
  numbers = jnp.array([zlib.crc32(share.name.encode()) for share in members], jnp.uint32)
  keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
  init, dtype = variable.get_metadata("init"), variable.get_value().dtype
  return jax.vmap(lambda key: init(key, _shape(variable, members[0]), dtype))(keys)


def _shape(variable: nnx.Variable, share: _Share) -> tuple[int, ...]:
  """Shape of one layer's share of a parameter."""
  return variable.get_value().shape[0 if share.row is None else 1 :]


def _shares(path: tuple, index: int, plan: LayerPlan) -> list[_Share]:
  """The layers' shares of the parameter at `path`, named by their layers' numbers."""
  part, *rest = path
  if part not in ("layers", "cycles", "epilogue"):
    return [_Share(".".join(map(str, path)), index, None)]
  position, *rest = rest
  first = {"layers": 0, "cycles": plan.start, "epilogue": plan.scanned_end}[part] + position
  name = lambda layer: ".".join((f"layers.{layer:05d}", *map(str, rest)))
  if part != "cycles":
    return [_Share(name(first), index, None)]
  return [_Share(name(first + row * plan.period), index, row) for row in range(plan.repeats)]
