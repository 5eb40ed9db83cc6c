"""Answers batches of prompts with the compiled programs of `decode_loop`, and times them.

Dims: B rows, N steps of one dispatch.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from MaxText.common.errors import CheckpointError
from MaxText.inference.decode_loop import NO_TOKEN, DecodeLoop, DecodeState
from MaxText.inference.prompts import Request, Settings
from MaxText.inference.sampling import rows

MAX_BATCH = 64  # rows of one batch; more prompts are answered in several batches of one shape
STREAM_SECONDS = 0.1  # a streaming dispatch picks about as many tokens as fit


class BatchRun:
  """One batch on its way: iterating gives the new tokens dispatch by dispatch.

  Attributes:
    prefill_seconds: time spent on reading the prompts, without compiling.
    decode_seconds: time spent on all tokens but each row's first, without compiling.
    first_token_seconds: time until the first tokens were known, with compiling.
  """

  def __init__(
    self,
    loop: DecodeLoop,
    requests: Sequence[Request],
    settings: Settings,
    stop_ids: Sequence[int],
    *,
    capacity: int,
    streams: bool = False,
  ):
    """Prepares a batch; nothing runs yet.

    Args:
      loop: the compiled programs.
      requests: one a row; one without tokens is a row of padding.
      settings: how to pick tokens.
      stop_ids: ids that end a row.
      capacity: S, cache slots of each row.
      streams: keep dispatches short, so that tokens appear as they come.
    """
    self._loop = loop
    self._requests = requests
    self._sampling = rows(len(requests), settings.temperature, settings.top_k, settings.top_p, settings.seed)
    self._stop_ids = stop_ids
    self._capacity = capacity
    self._streams = streams
    self.prefill_seconds = self.decode_seconds = self.first_token_seconds = 0.0

  def __iter__(self) -> Iterator[np.ndarray]:
    """Yields [B, N] int32 new tokens, -1 where a row had already stopped.

    Raises:
      CheckpointError: a logit is NaN or infinite.
    """
    started, compiled = time.perf_counter(), self._loop.compile_seconds
    prompts = [request.ids for request in self._requests]
    limits = [request.limit for request in self._requests]
    state = self._loop.prefill(prompts, limits, self._sampling, self._stop_ids, capacity=self._capacity)
    first = np.asarray(state.token)
    self._check(state)
    self.first_token_seconds = time.perf_counter() - started
    self.prefill_seconds = self.first_token_seconds - (self._loop.compile_seconds - compiled)
    yield np.where([len(prompt) > 0 for prompt in prompts], first, NO_TOKEN)[:, None]
    steps = 1 if self._streams else self._loop.steps
    while np.any(state.active):
      started, compiled = time.perf_counter(), self._loop.compile_seconds
      picked, state = self._loop.decode(state, self._sampling, self._stop_ids, steps)
      self._check(state)
      seconds = time.perf_counter() - started - (self._loop.compile_seconds - compiled)
      self.decode_seconds += seconds
      if self._streams:
        steps = max(1, min(self._loop.steps, int(STREAM_SECONDS * steps / max(seconds, 1e-9))))
      yield picked

  def _check(self, state: DecodeState) -> None:
    broken = np.flatnonzero(~np.asarray(state.finite))
    if broken.size:
      position = int(np.asarray(state.position)[broken[0]])
      raise CheckpointError(
        f"{self._requests[broken[0]].name}: the logits of token {position} are NaN or infinite; "
        "the weights are damaged, or too large for this dtype"
      )


def batches(count: int) -> list[range]:
  """Splits `count` prompts into the fewest batches of at most 64 rows and of even size."""
  size = -(-count // -(-count // MAX_BATCH))
  return [range(start, min(start + size, count)) for start in range(0, count, size)]
