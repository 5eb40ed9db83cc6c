"""A small K3 for the engine and for what serves it: solo answers of prompts of many lengths."""

import numpy as np
import pytest

from MaxText.checkpoints.load import load_params
from MaxText.configs import loader
from MaxText.inference.model import Model
from tests.inference.small_engine import LENGTHS, MARGIN, NEW, SHAPE, SPECIAL, VOCAB, logits_after
from tests.reference.generator import k3_config_json, write_checkpoint


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
  config = k3_config_json(**SHAPE, **SPECIAL)
  return write_checkpoint(tmp_path_factory.mktemp("engine"), config, seed=12, dtype="f32")


@pytest.fixture(scope="session")
def model(directory):
  cfg = loader.load(directory)
  return Model(cfg, load_params(directory, cfg, progress=False), None, "test", prefill_chunk=16)


@pytest.fixture(scope="session")
def requests(model):
  """Prompts of many lengths, with the tokens of their solo runs; none hangs on a rounding error."""
  rng, made = np.random.default_rng(3), []
  for length in LENGTHS:
    prompt = rng.integers(0, VOCAB - 4, length).tolist()
    [answer] = model.generate([prompt], max_new_tokens=NEW, stop_ids=())  # alone, one after the other
    top = np.sort(logits_after(model, prompt, answer.token_ids), axis=-1)
    assert np.min(top[:, -1] - top[:, -2]) > MARGIN
    made.append((prompt, answer.token_ids))
  return made
