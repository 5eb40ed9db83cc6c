"""Operator inputs and outputs of a public port, read in place."""

import numpy as np
import pytest

from tests.locations import OPS


def load_fixture(name: str) -> dict[str, np.ndarray]:
  """Returns the arrays of one fixture file, or skips the test where the fixtures are absent."""
  path = OPS / f"{name}.npz"
  if not path.exists():
    pytest.skip(f"operator fixtures are absent: {path}")
  with np.load(path) as arrays:
    return dict(arrays)


def assert_op_close(got: np.ndarray, want: np.ndarray) -> None:
  """Within 1e-5, absolute for values up to 1 and relative to the largest value beyond."""
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, float(np.abs(want).max())))
