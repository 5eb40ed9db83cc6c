"""Our side of the benchmark: the programs that `MaxText.decode` runs, warmed up before they are timed."""

import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from MaxText.checkpoints.load import load_params
from MaxText.configs.loader import load
from MaxText.inference import sampling
from MaxText.inference.decode_loop import DecodeLoop, DecodeState, cache_capacity


class Ours:
  """A loaded checkpoint with the operations of the peer's pipe."""

  def __init__(self, directory: Path, steps: int):
    """Loads `directory` in float32 and fixes N = `steps` tokens a dispatch."""
    decoder = load_params(directory, load(directory, ["dtype=float32"]), progress=False)
    self.loop = DecodeLoop(decoder, steps=steps)

  def logits(self, ids: Sequence[int]) -> np.ndarray:
    """Returns float32 logits [T, vocab] of one prompt."""
    return self.loop.logits(ids)

  def prefill(self, ids: Sequence[int]) -> float:
    """Seconds from a fresh cache to the first next token of one prompt."""
    return self._prefilled([list(ids)], 1)[1]

  def decode(self, batch: int, prompt: Sequence[int], steps: int) -> tuple[float, list[int]]:
    """Seconds of `steps` greedy steps of `batch` equal rows, and the tokens of the first row."""
    state, _ = self._prefilled([list(prompt)] * batch, steps + 1)
    start = time.perf_counter()
    picked, state = self.loop.decode(state, _greedy(batch), (), steps)
    jax.block_until_ready(state)
    return time.perf_counter() - start, picked[0].tolist()

  def _prefilled(self, prompts: list[list[int]], new_tokens: int) -> tuple[DecodeState, float]:
    """The state after equal prompts, and the seconds that took."""
    B = len(prompts)
    capacity = cache_capacity(len(prompts[0]), new_tokens, self.loop.prefill_chunk)
    start = time.perf_counter()
    state = self.loop.prefill(prompts, [new_tokens] * B, _greedy(B), (), capacity=capacity)
    jax.block_until_ready(state)
    return state, time.perf_counter() - start


def _greedy(batch: int) -> sampling.Sampling:
  return sampling.rows(batch, temperature=0.0, top_k=0, top_p=1.0, seed=0)
