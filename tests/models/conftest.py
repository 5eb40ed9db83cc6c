"""One small checkpoint of each family, loaded once for all model tests."""

import json

import pytest

from MaxText.checkpoints.load import load_params
from MaxText.configs.published import from_published
from tests.reference.generator import k3_config_json, kimi_linear_config_json, write_checkpoint

# 6 layers: a dense KDA layer, three AttnRes blocks, and two cycles of (KDA, MLA) for the scan to find
K3 = dict(num_hidden_layers=6, full_attn_layers=(2, 4, 6), hidden_size=48, vocab_size=64)


@pytest.fixture(scope="session")
def k3_directory(tmp_path_factory):
  return write_checkpoint(tmp_path_factory.mktemp("k3"), k3_config_json(**K3, **IDS), seed=3, dtype="f32")


@pytest.fixture(scope="session")
def k3_plain_directory(tmp_path_factory):
  """The same values as `k3_directory`, with plain experts that have gradients."""
  directory = tmp_path_factory.mktemp("k3_plain")
  return write_checkpoint(directory, k3_config_json(**K3, **IDS), seed=3, dtype="f32", packed=False)


@pytest.fixture(scope="session")
def kimi_linear_directory(tmp_path_factory):
  config = kimi_linear_config_json(num_hidden_layers=4, full_attn_layers=(3,), vocab_size=64, **IDS)
  return write_checkpoint(tmp_path_factory.mktemp("kimi_linear"), config, seed=4, dtype="f32")


IDS = dict(bos_token_id=61, eos_token_id=62, pad_token_id=63)


def load(directory, mesh_shardings=None, **ours):
  """Loads a published directory under schema overrides."""
  cfg = from_published(json.loads((directory / "config.json").read_text())).model_copy(update=ours)
  return load_params(directory, cfg, mesh_shardings=mesh_shardings, progress=False)


@pytest.fixture(scope="session")
def k3(k3_directory):
  return load(k3_directory)


@pytest.fixture(scope="session")
def k3_plain(k3_plain_directory):
  return load(k3_plain_directory)


@pytest.fixture(scope="session")
def kimi_linear(kimi_linear_directory):
  return load(kimi_linear_directory)
