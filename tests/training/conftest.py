"""Tests marked `train` run where maxtext is installed, and say so where it is not."""

import importlib.util

import pytest


def pytest_collection_modifyitems(config, items):
  if importlib.util.find_spec("maxtext") is not None:
    return
  for item in items:
    if item.get_closest_marker("train"):
      item.add_marker(pytest.mark.skip(reason="maxtext is not installed; pip install '.[train]' brings it"))
