"""Definition of the exchange, on the host and over all devices at once.

Dims: N devices, M rows sent, R rows of the receiving buffer, X what a row holds.
"""

import numpy as np
from jaxtyping import Int, Shaped


def ragged_all_to_all(
  x: Shaped[np.ndarray, "N M *X"],
  out: Shaped[np.ndarray, "N R *X"],
  input_offsets: Int[np.ndarray, "N N"],
  send_sizes: Int[np.ndarray, "N N"],
  output_offsets: Int[np.ndarray, "N N"],
) -> Shaped[np.ndarray, "N R *X"]:
  """Copies slice by slice.

  Args:
    x: [N, M, *X] rows of every device.
    out: [N, R, *X] buffer of every device.
    input_offsets: [N, N] (sender, receiver) first row of the slice.
    send_sizes: [N, N] its rows.
    output_offsets: [N, N] its place in the receiver's buffer.

  Returns:
    [N, R, *X].
  """
  out = out.copy()
  for sender, receiver in np.ndindex(send_sizes.shape):
    start, rows = input_offsets[sender, receiver], send_sizes[sender, receiver]
    place = output_offsets[sender, receiver]
    out[receiver, place : place + rows] = x[sender, start : start + rows]
  return out
