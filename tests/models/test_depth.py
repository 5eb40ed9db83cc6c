"""Under scan neither the program nor its temporary memory grows with the number of cycles."""

import pytest

from benchmarks.depth import DEPTHS, lowered


@pytest.fixture(scope="module")
def programs():
  return [lowered(layers) for layers in DEPTHS]


def test_the_program_has_the_same_size(programs):
  short, long = (len(program.as_text().splitlines()) for program in programs)
  assert long == short


def test_temporary_memory_stays_flat(programs):
  short, long = (program.compile().memory_analysis().temp_size_in_bytes for program in programs)
  assert long <= 1.05 * short
