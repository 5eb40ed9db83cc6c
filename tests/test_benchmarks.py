"""The benchmarks start, gate and report; the figures themselves belong to no test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kernels
from MaxText.kernels.short_conv import cases

ROOT = Path(__file__).parents[1]


@pytest.fixture
def small_shapes(monkeypatch):
  monkeypatch.setattr(cases, "SPEED_SHAPES", {"small": (1, 8, (3, 4))})


def test_a_kernel_benchmark_prints_one_line_an_implementation(small_shapes, capsys):
  assert kernels.main(["short_conv"]) == 0
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [line["impl"] for line in lines] == ["reference", "shifted"]
  assert all(line["error"] <= kernels.TOLERANCE and line["median_ms"] > 0 for line in lines)


def test_an_implementation_that_disagrees_is_not_timed(small_shapes, monkeypatch, capsys):
  monkeypatch.setattr(kernels, "relative_error", lambda got, want: 1.0)
  assert kernels.main(["short_conv"]) == 1
  assert all("median_ms" not in json.loads(line) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("start", [("-m", "benchmarks.run"), ("benchmarks/run.py",)], ids=" ".join)
def test_the_benchmark_starts_as_a_module_and_as_a_file(start):
  done = subprocess.run([sys.executable, *start, "--help"], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0 and "--quick" in done.stdout, done.stderr
