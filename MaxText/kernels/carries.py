"""Loop carries that keep one type inside `shard_map`."""

import jax
from jax import lax


def match_manual_axes(carry: jax.Array, *inputs: jax.Array) -> jax.Array:
  """Marks `carry` as varying over every manual mesh axis over which one of `inputs` varies.

  A scan refuses a carry that enters replicated and leaves varying; zeros made inside `shard_map` enter so.
  """
  axes = frozenset().union(*map(_varying, inputs)) - _varying(carry)
  return lax.pcast(carry, tuple(sorted(axes)), to="varying") if axes else carry


def _varying(x):
  return jax.typeof(x).manual_axis_type.varying
