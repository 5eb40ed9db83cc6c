"""Which weights a command takes, and that it takes no others in their place."""

import pytest

from MaxText import decode
from MaxText.checkpoints.directory import RUN_FILE, write_companions, write_orbax_file
from tests.small import k3_config


@pytest.fixture
def run(tmp_path):
  """A training run that was killed while it saved step 14; of step 7 only the name is there."""
  home, cfg = tmp_path / "run", k3_config()
  (home / "checkpoints/14.orbax-checkpoint-tmp").mkdir(parents=True)
  write_companions(home, cfg, None)
  write_orbax_file(home, RUN_FILE, cfg)
  return home


def refusal(capsys, config) -> str:
  assert decode.main([str(config), "prompt_ids=5"]) == 2
  printed = capsys.readouterr()
  assert printed.out == "" and printed.err.count("\n") == 1
  return printed.err


def test_a_run_without_a_whole_checkpoint_gives_no_random_weights(run, capsys):
  for place in (run, run / "checkpoints/14.orbax-checkpoint-tmp"):
    assert f"{place}: no whole checkpoint of this training run" in refusal(capsys, place)


def test_a_checkpoint_that_is_not_there_is_not_replaced_by_the_last(run, capsys):
  words = "no such checkpoint of this training run; there are none"
  assert f"{run}/checkpoints/9: {words}" in refusal(capsys, run / "checkpoints/9")
  for step in ("7", "11"):
    (run / "checkpoints" / step).mkdir()
  assert refusal(capsys, run / "checkpoints/9").endswith("this training run; there are 11, 7\n")
