"""The record of a run has each step once, whatever was interrupted and went on."""

import json
import math

from MaxText.training.progress import Progress, Record


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_goes_on_replaces_what_it_does_again(tmp_path):
  path = tmp_path / "metrics.jsonl"
  first = Record(path)
  for step in range(5):
    first(step, "train", {"loss": step})
  again = Record(path)
  for step in (3, 4, 5):
    again(step, "train", {"loss": 10 * step})
  assert [(line["step"], line["loss"]) for line in read(path)] == [
    (0, 0),
    (1, 1),
    (2, 2),
    (3, 30),
    (4, 40),
    (5, 50),
  ]


def test_a_line_that_a_kill_tore_stops_no_run(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
  Record(path)(1, "train", {"loss": 2.0})
  assert [line["step"] for line in read(path)] == [0, 1] and list(tmp_path.iterdir()) == [path]


def test_an_evaluation_adds_a_line_and_keeps_the_others(tmp_path, capsys):
  record = Record(tmp_path / "metrics.jsonl")
  record(0, "train", {"loss": 2.0})
  record(0, "eval", {"eval/avg_loss": 1.5})
  record(1, "train", {"loss": math.nan})
  assert read(tmp_path / "metrics.jsonl") == [
    {"step": 0, "loss": 2.0},
    {"step": 0, "eval/avg_loss": 1.5},
    {"step": 1, "loss": None},
  ]
  assert capsys.readouterr().err == "step 1  evaluation loss 1.5000\n"


def test_a_long_run_prints_few_lines_and_its_last_one(capsys):
  progress = Progress(steps=1003, tokens_per_step=10)
  for step in range(1003):
    progress.step(step, 1.0)
  lines = capsys.readouterr().err.splitlines()
  assert 45 <= len(lines) <= 55
  assert lines[-1].startswith("step 1003/1003  loss 1.0000  ") and lines[-1].endswith(" tokens/s  00:00 left")


def test_the_first_rows_that_are_dropped_are_told_once(capsys):
  progress = Progress(3, 8)
  for step, dropped in enumerate((0, 1200, 7)):
    progress.step(step, 1.0, dropped)
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "room" in line]
  assert line.startswith("step 2: 1,200 choices of an expert found no room (moe_capacity_factor)")
