"""Operator inputs and outputs of a public port, read in place."""

from pathlib import Path

import numpy as np
import pytest

_FOLDER = Path(__file__).parents[3] / "shared" / "fixtures" / "ops"


def load_fixture(name: str) -> dict[str, np.ndarray]:
  """Returns the arrays of one fixture file, or skips the test where the fixtures are absent."""
  path = _FOLDER / f"{name}.npz"
  if not path.exists():
    pytest.skip(f"operator fixtures are absent: {path}")
  with np.load(path) as arrays:
    return dict(arrays)
