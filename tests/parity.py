"""Runs a loaded decoder the ways it is used, so that each way can be held against the float64 reference."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.checkpoints.load import load_params
from MaxText.configs.published import from_published
from tests.reference.model import Reference


class Runner:
  """A published checkpoint in float32 and one compiled program per shape.

  Rows of unequal length share a program: they are padded on the right with segment 0.
  """

  def __init__(self, directory: Path, *, jit: bool = True, **keys):
    """Loads `directory`; `keys` override how it runs (scan_layers, expert_weights, ...)."""
    published = json.loads((directory / "config.json").read_text())
    cfg = from_published(published, str(directory / "config.json")).model_copy(update=keys)
    self.decoder = load_params(directory, cfg, progress=False)
    graph, self._state = nnx.split(self.decoder)

    def call(state, ids, cache, segment_ids):
      return nnx.merge(graph, state)(ids, cache, segment_ids)

    self._call = jax.jit(call) if jit else call

  def whole(self, ids: Sequence[int]) -> np.ndarray:
    """Logits [T, vocabulary] of one unpadded prompt, without a cache."""
    return np.asarray(self._call(self._state, jnp.asarray([ids]), None, None)[0][0])

  def ragged(self, rows: Sequence[Sequence[int]], cache=None, width: int | None = None):
    """Logits of each row (a list of [T, vocabulary]) and the cache after it."""
    width = width or max(map(len, rows))
    ids = np.zeros((len(rows), width), np.int32)
    segments = np.zeros((len(rows), width), np.int32)
    for row, tokens in enumerate(rows):
      ids[row, : len(tokens)], segments[row, : len(tokens)] = tokens, 1
    logits, cache = self._call(self._state, jnp.asarray(ids), cache, jnp.asarray(segments))
    return [np.asarray(out[: len(tokens)]) for out, tokens in zip(logits, rows)], cache

  def pieces(self, rows: Sequence[Sequence[int]], splits: Sequence[int]) -> list[np.ndarray]:
    """Logits of each row when its first `splits[row]` tokens come in one call and the rest in another."""
    width = max(map(len, rows))
    cache = self.decoder.init_cache(len(rows), width)
    heads, cache = self.ragged([row[:n] for row, n in zip(rows, splits)], cache, width)
    tails, _ = self.ragged([row[n:] for row, n in zip(rows, splits)], cache, width)
    return [np.concatenate(pair) for pair in zip(heads, tails)]

  def steps(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Logits of each row when every token comes in a call of its own; a row that has ended gets padding."""
    width = max(map(len, rows))
    cache, outs = self.decoder.init_cache(len(rows), width), []
    for t in range(width):
      out, cache = self.ragged([row[t : t + 1] for row in rows], cache, 1)
      outs.append(out)
    return [np.concatenate([out[row] for out in outs]) for row in range(len(rows))]


class _Wobbling(Reference):
  """A reference whose weights are all off by up to four float32 units in the last place."""

  def __init__(self, directory: Path, seed: int):
    super().__init__(directory)
    self._rng = np.random.default_rng(seed)

  def weight(self, name: str) -> np.ndarray:
    exact = super().weight(name)
    return exact * (1 + 2.0**-21 * self._rng.uniform(-1, 1, exact.shape))


def rounding_reach(directory: Path, ids: Sequence[int], draws: int = 8) -> np.ndarray:
  """How far [T, 1] the logits of each position move when weights are rounded otherwise: the worst of `draws`.

  A float32 program cannot be held to less than this. Most positions move by 1e-5; one whose query or key
  almost cancels is normalised up with its rounding error and moves a hundred times as far.
  """
  exact = Reference(directory).logits(ids)
  moved = [np.abs(_Wobbling(directory, seed).logits(ids) - exact) for seed in range(draws)]
  return np.max(moved, axis=(0, 2))[:, None]


def assert_parity(
  got: Sequence[np.ndarray], want: Sequence[np.ndarray], reach: Sequence[np.ndarray] | None = None
) -> None:
  """Same greedy token everywhere, and logits within 1e-4, plus `reach` of each row where one is given."""
  for row, (mine, reference) in enumerate(zip(got, want, strict=True)):
    np.testing.assert_array_equal(mine.argmax(axis=-1), reference.argmax(axis=-1))
    excess = np.abs(mine - reference) - (0.0 if reach is None else reach[row])
    assert excess.max() <= 1e-4, f"row {row}: {excess.max():.1e} past what rounding explains"
