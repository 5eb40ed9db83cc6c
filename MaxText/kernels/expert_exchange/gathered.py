"""The exchange without a collective of its own: everyone gathers all rows and picks those meant for it.

For platforms whose XLA has no ragged collective. Memory and traffic grow with N times M.

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
  """Picks each row of the result from the gathered rows; arguments as the operation of this package."""
  del recv_sizes  # what the senders say
  me = lax.axis_index(axis_name)
  rows = lax.all_gather(x, axis_name)
  tables = jnp.stack([input_offsets, send_sizes, output_offsets])
  first, size, place = lax.all_gather(tables, axis_name)[:, :, me].T
  offset = jnp.arange(out.shape[0]) - place[:, None]
  arrives = (offset >= 0) & (offset < size[:, None])
  sender = jnp.argmax(arrives, axis=0)
  source = first[sender] + jnp.take_along_axis(offset, sender[None], axis=0)[0]
  picked = rows[sender, jnp.clip(source, 0, x.shape[0] - 1)]
  is_new = jnp.any(arrives, axis=0).reshape(-1, *(1,) * (x.ndim - 1))
  return jnp.where(is_new, picked, out)
