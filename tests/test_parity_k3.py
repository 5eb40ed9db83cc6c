"""Kimi K3: the JAX decoder gives Moonshot's tokens and the float64 reference's logits, however it is run."""

import json
from functools import cache

import numpy as np
import pytest

from tests.locations import ORACLE
from tests.parity import Runner, assert_parity, rounding_reach
from tests.reference.generator import k3_config_json, write_checkpoint
from tests.reference.model import Reference

MODES = {
  "unrolled": {"scan_layers": False},
  "scanned": {"scan_layers": True},
  "dequantized": {"scan_layers": False, "expert_weights": "dequantized"},
}
IDS = np.random.default_rng(3).integers(0, 93, 21).tolist()


@pytest.fixture(scope="module")
def oracle() -> dict[str, dict]:
  """Moonshot's cases: prompt and argmax at each position."""
  if not ORACLE.is_dir():
    pytest.skip(f"Moonshot's tiny oracle absent: {ORACLE}")
  return json.loads((ORACLE / "reference_tokens.json").read_text())


@cache
def oracle_runner(mode: str) -> Runner:
  return Runner(ORACLE, **MODES[mode])


@cache
def oracle_truth(ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
  """The reference's logits, and how far rounding alone moves them."""
  return Reference(ORACLE).logits(ids), rounding_reach(ORACLE, ids)


def assert_moonshots(got: list[np.ndarray], cases: list[dict]) -> None:
  """Every token is Moonshot's, every logit the reference's."""
  for mine, case in zip(got, cases, strict=True):
    assert mine.argmax(axis=-1).tolist() == case["argmax_at_each_position"]
  want, reach = zip(*(oracle_truth(tuple(case["prompt_and_continuation"])) for case in cases))
  assert_parity(got, want, reach)


def test_one_shot_without_jit_gives_moonshots_tokens(oracle):
  case = oracle["short"]
  assert_moonshots([Runner(ORACLE, jit=False).whole(case["prompt_and_continuation"])], [case])


@pytest.mark.parametrize("mode", ["unrolled", "scanned"])
def test_one_or_two_pieces_give_moonshots_tokens(oracle, mode):
  cases = [case for case in oracle.values() for _ in range(5)]
  rows = [case["prompt_and_continuation"] for case in cases]
  splits = [n for row in rows[::5] for n in (1, 8, len(row) // 2, len(row) - 1, len(row))]
  assert_moonshots(oracle_runner(mode).pieces(rows, splits), cases)


@pytest.mark.parametrize("mode", MODES)
def test_cached_single_steps_give_moonshots_tokens(oracle, mode):
  cases = list(oracle.values())
  assert_moonshots(oracle_runner(mode).steps([case["prompt_and_continuation"] for case in cases]), cases)


# --- a stranger's clone: seeded checkpoints against the reference -------------------------------------------


@pytest.fixture(scope="module")
def unrolled(tmp_path_factory):
  """Six layers, three AttnRes blocks, packed experts in three shards with vision tensors beside them."""
  directory = tmp_path_factory.mktemp("k3")
  options = {"shards": 3, "conv_rank": 2, "a_log_width": 8, "vision": True}
  config = k3_config_json(num_hidden_layers=6, full_attn_layers=[3, 5, 6])
  write_checkpoint(directory, config, seed=1, **options)
  return Runner(directory, scan_layers=False), Reference(directory).logits(IDS)


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
  """Ten layers whose AttnRes blocks of three end inside the two scanned cycles of four; plain experts."""
  directory = tmp_path_factory.mktemp("k3-scanned")
  config = k3_config_json(num_hidden_layers=10, full_attn_layers=[4, 8, 10], attn_res_block_size=3)
  write_checkpoint(directory, config, seed=2, packed=False)
  return Runner(directory, scan_layers=True), Reference(directory).logits(IDS)


def test_generated_checkpoint_without_cache_or_padding(unrolled):
  runner, want = unrolled
  assert_parity([runner.whole(IDS)], [want])


@pytest.mark.parametrize("model", ["unrolled", pytest.param("scanned", marks=pytest.mark.slow)])
def test_generated_checkpoint_in_one_or_two_pieces(model, request):
  runner, want = request.getfixturevalue(model)
  assert_parity(runner.pieces([IDS] * 5, [1, 8, 13, 20, 21]), [want] * 5)


def test_generated_checkpoint_by_cached_steps(unrolled):
  runner, want = unrolled
  assert_parity(runner.steps([IDS]), [want])
