"""The 5-gram baseline of scripts/bits_per_byte.py against its definition, counted with dictionaries."""

import importlib.util
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bits_per_byte.py"
TEXTS = ["abracadabra", "a cadabra brac", "", "尼罗河", "abra" * 9]
ORDER = 3


@pytest.fixture(scope="module")
def script():
  spec = importlib.util.spec_from_file_location("bits_per_byte", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def counted_grams(texts, order):
  padded = [[256] * (order - 1) + [*text.encode(), 256] for text in texts]
  return Counter(tuple(row[i : i + order]) for row in padded for i in range(len(row) - order + 1))


def slow_probability(grams, context, symbol):
  """Modified Kneser-Ney by recursion; `grams` are the counts of the order of `context` and `symbol`."""
  below = None
  if context:
    preceded = defaultdict(set)
    for gram in grams:
      preceded[gram[1:]].add(gram[0])
    below = slow_probability({g: len(s) for g, s in preceded.items()}, context[1:], symbol)
  else:
    below = 1 / 257
  sizes = [max(sum(count == k for count in grams.values()), 1) for k in (1, 2, 3, 4)]
  y = sizes[0] / (sizes[0] + 2 * sizes[1])
  discount = [0] + [max(k - (k + 1) * y * sizes[k] / sizes[k - 1], 0) for k in (1, 2, 3)]
  removed = lambda count: min(discount[min(count, 3)], count)
  own = {gram: count for gram, count in grams.items() if gram[:-1] == context}
  if not own:
    return below
  total, count = sum(own.values()), own.get((*context, symbol), 0)
  return (count - removed(count)) / total + below * sum(map(removed, own.values())) / total


def test_probabilities_are_those_of_the_definition(script):
  levels, grams = script.fit(TEXTS, ORDER), counted_grams(TEXTS, ORDER)
  for context in ((97, 98), (256, 97), (256, 256), (120, 98), (1, 2)):
    every = np.array([(context[0] * 257 + context[1]) * 257 + symbol for symbol in range(257)])
    got = script.probabilities(levels, every)
    assert got.sum() == pytest.approx(1, abs=1e-12)
    for symbol in (97, 98, 114, 256, 3):
      assert got[symbol] == pytest.approx(slow_probability(dict(grams), context, symbol), abs=1e-12)


def test_bits_count_every_byte_and_the_end(script):
  levels = script.fit(TEXTS, ORDER)
  p = script.probabilities(levels, script.codes(["abc"], ORDER))
  assert len(p) == 4
  assert script.ngram_bits(TEXTS, ["abc"], ORDER) == pytest.approx(-np.log2(p).sum() / 3)
