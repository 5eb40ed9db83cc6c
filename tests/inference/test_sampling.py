"""Sampling: exact sets of kept tokens, ties, seeds, and independence of the rows beside."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.inference.sampling import Sampling, kept_tokens, rows, sample

VOCAB = 12
kept = jax.jit(kept_tokens)
pick = jax.jit(sample)


def logits_of(seed, batch, vocabulary=VOCAB):
  """Logits with many exact ties: whole numbers from -3 to 3."""
  return np.random.default_rng(seed).integers(-3, 4, (batch, vocabulary)).astype(np.float32)


def kept_slowly(logits, top_k, top_p, min_p):
  """The definition in float64: rank by (-logit, id), keep k, then the first of mass p, if likely."""
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  order = order[: top_k or len(order)]
  mass = np.exp(np.float64(logits[order]) - max(logits))
  mass /= mass.sum()
  before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
  likely = np.exp(np.float64(logits) - max(logits)) >= min_p
  return {i for i, held in zip(order, before) if held < top_p and likely[i]}


@pytest.mark.parametrize("top_k", [0, 1, 3, VOCAB, 50])
@pytest.mark.parametrize("top_p", [1e-6, 0.31, 0.7, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.9])
def test_kept_tokens_are_those_of_the_definition(top_k, top_p, min_p):
  logits = logits_of(top_k, 4)
  full = lambda value: np.full(4, value, np.float32)
  got = np.asarray(kept(logits, np.full(4, top_k), full(top_p), full(min_p)))
  for row in range(4):
    assert set(np.flatnonzero(got[row])) == kept_slowly(logits[row], top_k, top_p, min_p)


def test_equal_logits_are_kept_by_lowest_id():
  one = np.ones(1, np.float32)
  got = kept(np.zeros((1, VOCAB), np.float32), np.array([5]), one, 0 * one)
  np.testing.assert_array_equal(np.flatnonzero(got[0]), np.arange(5))


def test_temperature_zero_takes_the_lowest_id_of_the_maxima():
  logits = logits_of(1, 6)
  got = pick(logits, np.arange(6), rows(6, 0.0, 0, 1.0, 0))
  np.testing.assert_array_equal(got, logits.argmax(-1))


def test_top_k_of_one_and_tiny_temperature_are_greedy():
  logits = logits_of(2, 6)
  for settings in (rows(6, 1.0, 1, 1.0, 3), rows(6, 1.0, 0, 1e-6, 3)):
    np.testing.assert_array_equal(pick(logits, np.arange(6), settings), logits.argmax(-1))
  distinct = np.random.default_rng(0).permuted(np.tile(np.arange(VOCAB, dtype=np.float32), (6, 1)), axis=1)
  got = pick(distinct, np.arange(6), rows(6, 1e-30, 0, 1.0, 3))
  np.testing.assert_array_equal(got, distinct.argmax(-1))


def test_draws_follow_the_distribution():
  n, logits = 8000, np.array([0.0, 1.0, 2.0, -np.inf, 0.5], np.float32)
  tiled = np.tile(logits, (n, 1))
  got = np.asarray(pick(tiled, np.arange(n), rows(n, 0.8, 0, 1.0, 11)))
  want = np.asarray(jax.nn.softmax(logits / 0.8))
  np.testing.assert_allclose(np.bincount(got, minlength=5) / n, want, atol=4 * (0.25 / n) ** 0.5)


def test_a_row_draws_the_same_beside_any_others():
  logits = logits_of(4, 5)
  settings = [
    (0.0, 0, 1, 0, 1),
    (0.7, 3, 1, 0, 2),
    (1.3, 0, 0.6, 0, 3),
    (1, 0, 1, 0.2, 4),
    (0.9, 4, 0.9, 0, 5),
  ]
  columns = [np.asarray(column) for column in zip(*settings)]
  types = (np.float32, np.int32, np.float32, np.float32, np.uint32)
  together = Sampling(*(column.astype(kind) for column, kind in zip(columns, types)))
  position = np.array([7, 7, 9, 11, 13])
  want = np.asarray(pick(logits, position, together))
  for row, (temperature, top_k, top_p, min_p, seed) in enumerate(settings):
    alone = rows(1, temperature, top_k, top_p, seed, min_p)
    alone = pick(logits[row : row + 1], position[row : row + 1], alone)
    assert int(alone[0]) == want[row]


def test_seed_and_position_decide_the_draw():
  logits = np.zeros((1, 1000), np.float32)
  draws = {
    (seed, position): int(pick(logits, np.array([position]), rows(1, 1.0, 0, 1.0, seed))[0])
    for seed, position in itertools.product((0, 1, 2**32 - 1), (0, 1, 2))
  }
  assert len(set(draws.values())) == len(draws)
  again = pick(logits, np.array([2]), rows(1, 1.0, 0, 1.0, 1))
  assert int(again[0]) == draws[1, 2]


def test_no_setting_compiles_anything():
  count = jax.jit(lambda *args: sample(*args))
  for settings in (rows(2, 0.0, 0, 1.0, 0), rows(2, 1.0, 5, 0.5, 1), rows(2, 0.3, 0, 0.9, [1, 2])):
    count(jnp.zeros((2, VOCAB)), np.arange(2), settings)
  assert count._cache_size() == 1
