"""Checkpoints that only read tests share."""

import pytest

from tests.checkpoints.samples import write_k3, write_kimi_linear


@pytest.fixture(scope="session")
def k3_directory(tmp_path_factory):
  """A small Kimi K3 in three shards, with vision tensors and A_log padded to 128."""
  return write_k3(tmp_path_factory.mktemp("k3"), shards=3, vision=True, a_log_width=128)


@pytest.fixture(scope="session")
def kimi_linear_directory(tmp_path_factory):
  """A small Kimi-Linear in one file, plain experts."""
  return write_kimi_linear(tmp_path_factory.mktemp("kimi_linear"))
