"""The exchange as XLA's own collective, on TPU and GPU.

Dims: N devices of the axis, M rows sent, R rows of the receiving buffer, X what a row holds.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def ragged_all_to_all(
  x: Shaped[Array, "M *X"],
  out: Shaped[Array, "R *X"],
  input_offsets: Int[Array, "N"],
  send_sizes: Int[Array, "N"],
  output_offsets: Int[Array, "N"],
  recv_sizes: Int[Array, "N"],
  axis_name: str | tuple[str, ...],
) -> Shaped[Array, "R *X"]:
  """Calls `jax.lax.ragged_all_to_all`; arguments as the operation of this package.

  The rows go into a buffer of zeros and are merged with `out` here: jax 0.12 marks the places that received
  something with `at[start].set(1)` and `at[end].add(-1)` in its transpose for the buffer, which an empty
  slice upsets when it shares its start with another one.
  """
  tables = input_offsets, send_sizes, output_offsets, recv_sizes
  rows = lax.ragged_all_to_all(x, lax.stop_gradient(jnp.zeros_like(out)), *tables, axis_name=axis_name)
  place = lax.all_to_all(output_offsets, axis_name, 0, 0, tiled=True)
  offset = jnp.arange(out.shape[0]) - place[:, None]
  arrived = jnp.any((offset >= 0) & (offset < recv_sizes[:, None]), axis=0)
  return jnp.where(arrived.reshape(-1, *(1,) * (x.ndim - 1)), rows, out)
