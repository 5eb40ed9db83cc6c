"""Parameters and the dtype policy: how a weight is declared, named for sharding, and drawn.

Each parameter carries `axes`, one logical axis name per dimension. A mesh file maps those names to mesh axes;
layers never see a mesh.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


class Frozen(nnx.Variable):
  """A stored tensor that no gradient reaches: packed expert bytes and their scales."""


def param(
  rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str, init: Initializer
) -> nnx.Param:
  """Draws one weight of `shape` and tags it with its logical axes.

  Raises:
    ValueError: `axes` does not name every dimension.
  """
  if len(axes) != len(shape):
    raise ValueError(f"{len(shape)} dimensions {shape} but {len(axes)} axis names {axes}")
  return nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)), axes=axes)


def normal(stddev: float) -> Initializer:
  """Initializer N(0, stddev), the published `initializer_range` rule (spec 2.10)."""
  return jax.nn.initializers.normal(stddev)


ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros
