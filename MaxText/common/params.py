"""Parameters and the dtype policy: how a weight is declared, named for sharding, and drawn.

Each parameter carries `axes`, one logical axis name per dimension, and `init`, what it is drawn from. A mesh
file maps the names to mesh axes; layers never see a mesh. Initial values: spec 2.10.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]
"""(key, shape, dtype) -> values. Equal settings make equal objects, so that two graphs compare equal."""


class Frozen(nnx.Variable):
  """A stored tensor that no gradient reaches: packed expert bytes and their scales."""


def param(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  dtype: str,
  init: Initializer,
  kind: type[nnx.Variable] = nnx.Param,
) -> nnx.Variable:
  """Draws one weight of `shape` and tags it with its logical axes and its initializer.

  Raises:
    ValueError: `axes` does not name every dimension.
  """
  if len(axes) != len(shape):
    raise ValueError(f"{len(shape)} dimensions {shape} but {len(axes)} axis names {axes}")
  return kind(init(rngs.params(), shape, jnp.dtype(dtype)), axes=axes, init=init)


@dataclasses.dataclass(frozen=True)
class Normal:
  """N(0, stddev); with `zero_row`, that row of a matrix is 0."""

  stddev: float
  zero_row: int | None = None

  def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Draws values of `shape`."""
    values = self.stddev * jax.random.normal(key, shape, dtype)
    return values if self.zero_row is None else values.at[self.zero_row].set(0)


@dataclasses.dataclass(frozen=True)
class Uniform:
  """U(-bound, bound)."""

  bound: float

  def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Draws values of `shape`."""
    return jax.random.uniform(key, shape, dtype, -self.bound, self.bound)


@dataclasses.dataclass(frozen=True)
class Constant:
  """The same value everywhere."""

  value: float

  def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Fills `shape`; the key is not used."""
    return jnp.full(shape, self.value, dtype)


def normal(stddev: float, zero_row: int | None = None) -> Initializer:
  """Initializer N(0, stddev), the published `initializer_range` rule (spec 2.10)."""
  return Normal(stddev, zero_row)


def kaiming_uniform(fan_in: int) -> Initializer:
  """Initializer U(-b, b) with b = fan_in**-0.5: Kaiming's rule with a = sqrt(5)."""
  return Uniform(fan_in**-0.5)


ones = Constant(1.0)
zeros = Constant(0.0)
