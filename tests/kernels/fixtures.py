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
