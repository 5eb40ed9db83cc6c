"""Kimi-Linear: the JAX decoder gives the logits of transformers and of the float64 reference."""

from pathlib import Path

import numpy as np
import pytest

import MaxText
from tests.parity import Runner, assert_parity
from tests.reference.generator import kimi_linear_config_json, write_checkpoint
from tests.reference.model import Reference

GOLDEN = Path(__file__).parent / "golden"
IDS = np.random.default_rng(3).integers(0, 93, 21).tolist()


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
  """Prompts and the logits that transformers 5.24 gave (`tests/golden/make_kimi_linear.py`)."""
  return dict(np.load(GOLDEN / "kimi_linear.npz"))


@pytest.fixture(scope="module")
def runner() -> Runner:
  return Runner(GOLDEN / "kimi_linear", scan_layers=False)


def test_prompt_logits_are_those_of_transformers(golden, runner):
  rows = [golden["short_ids"].tolist(), golden["long_ids"].tolist()]
  got, _ = runner.ragged(rows)
  assert_parity(got, [golden["short_logits"], golden["long_logits"]])


def test_cached_steps_are_those_of_transformers(golden, runner):
  want = golden["steps_logits"]
  (got,) = runner.steps([golden["steps_ids"].tolist()])
  assert_parity([got[-len(want) :]], [want])


def test_public_api_gives_the_logits_of_transformers(golden):
  model = MaxText.from_pretrained(GOLDEN / "kimi_linear", dtype="float32")
  got = model.logits(golden["short_ids"].tolist())
  assert got.dtype == np.float32
  assert_parity([np.asarray(got)], [golden["short_logits"]])


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
  """Ten layers, eight of them in two scanned cycles of four."""
  directory = tmp_path_factory.mktemp("kimi-linear")
  config = kimi_linear_config_json(num_hidden_layers=10, full_attn_layers=[4, 8, 10])
  write_checkpoint(directory, config, seed=1, shards=2)
  return Runner(directory, scan_layers=True), Reference(directory).logits(IDS)


def test_generated_checkpoint_in_one_or_two_pieces(scanned):
  runner, want = scanned
  assert_parity(runner.pieces([IDS] * 5, [1, 8, 13, 20, 21]), [want] * 5)


def test_generated_checkpoint_by_cached_steps(scanned):
  runner, want = scanned
  assert_parity(runner.steps([IDS]), [want])
