"""Exchanges that tests and benchmarks share: how many rows each device sends to each.

Dims: N devices, M rows sent, R rows of the receiving buffer.
"""

import numpy as np
from jaxtyping import Int32

DEVICES = 8


def send_matrices() -> dict[str, Int32[np.ndarray, "N N"]]:
  """Rows [N, N] (sender, receiver): uneven, sparse, all to one device, all from one, to itself, none."""
  rng = np.random.default_rng(0)
  zeros = np.zeros((DEVICES, DEVICES), np.int32)
  to_one, from_one = zeros.copy(), zeros.copy()
  to_one[:, 5], from_one[2, :] = 24, 3
  sparse = rng.integers(0, 4, zeros.shape) * (rng.random(zeros.shape) < 0.3)
  return {
    "uneven": rng.integers(0, 4, zeros.shape).astype(np.int32),
    "sparse": sparse.astype(np.int32),
    "worst_skew": to_one,
    "one_sender": from_one,
    "to_itself": np.diag(np.arange(DEVICES)).astype(np.int32),
    "nothing": zeros,
  }


def offsets(
  send_sizes: Int32[np.ndarray, "N N"],
) -> tuple[Int32[np.ndarray, "N N"], Int32[np.ndarray, "N N"]]:
  """Returns input and output offsets [N, N] that pack the slices of send_sizes [N, N] without a gap."""
  inputs = np.cumsum(send_sizes, axis=1, dtype=np.int32) - send_sizes
  outputs = np.cumsum(send_sizes, axis=0, dtype=np.int32) - send_sizes
  return inputs, outputs
