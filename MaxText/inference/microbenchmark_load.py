"""Times whole requests through the scheduler: the wait for the first token, and for each further one."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from MaxText.common.errors import InputError
from MaxText.inference.engine import Engine
from MaxText.inference.measurement import distribution
from MaxText.inference.prompts import Settings
from MaxText.inference.scheduler import Scheduler
from MaxText.inference.serving import Job, Observer, Reason


class Heard(Observer):
  """Notes the times of all tokens.

  Attributes:
    first: seconds from each job's arrival to its first token.
    between: seconds between the tokens of a job; those of one round share the time since the last one.
    new_tokens: tokens of all answers.
    preemptions: jobs that had to pause.
    peak: most jobs that held a slot at once.
    reasons: why each job ended.
  """

  def __init__(self, engine: Engine):
    self._engine = engine
    self.first: list[float] = []
    self.between: list[float] = []
    self.new_tokens = self.preemptions = self.peak = 0
    self.reasons: list[Reason] = []

  def first_token(self, seconds: float) -> None:
    """Notes the time to a job's first token."""
    self.first.append(seconds)

  def tokens(self, count: int, seconds: float | None) -> None:
    """Notes the time since a job's last token, and how many jobs it shared the engine with."""
    self.peak = max(self.peak, self._engine.resources.used_slots)
    self.new_tokens += count
    if seconds is not None:
      self.between += [seconds / count] * count

  def preempted(self) -> None:
    """Counts a job that pauses."""
    self.preemptions += 1

  def finished(self, reason: Reason, seconds: float) -> None:
    """Notes why a job ended."""
    self.reasons.append(reason)


def serve_load(
  engine: Engine,
  prompts: Sequence[Sequence[int]],
  *,
  warm_up: Sequence[Sequence[int]],
  new_tokens: int,
  concurrency: int,
  on_end: Callable[[], object],
) -> dict[str, Any]:
  """Answers all prompts, the next one arriving when one of the earlier ones has been answered.

  Args:
    engine: idle, and idle again afterwards.
    prompts: token ids of each request, in order of arrival.
    warm_up: prompts to answer before the clock starts, one of each length.
    new_tokens: of every answer; no token ends one.
    concurrency: requests that are on their way at once; the report has how many held a slot, too.
    on_end: called after each answer.

  Raises:
    InputError: an answer broke off, because a logit is not finite.
  """
  _answer(engine, warm_up, 2, concurrency, lambda: None)
  start = time.perf_counter()
  heard = _answer(engine, prompts, new_tokens, concurrency, on_end)
  seconds = time.perf_counter() - start
  return {
    "requests": len(prompts),
    "concurrency": concurrency,
    "peak_concurrency": heard.peak,
    "prompt_tokens": sum(map(len, prompts)),
    "new_tokens": heard.new_tokens,
    "time_in_s": seconds,
    "requests_per_second": len(prompts) / seconds,
    "total_throughput_tokens_per_second": heard.new_tokens / seconds,
    "time_to_first_token": distribution(heard.first),
    "inter_token": distribution(heard.between),
    "preemptions": heard.preemptions,
  }


def _answer(
  engine: Engine,
  prompts: Sequence[Sequence[int]],
  new_tokens: int,
  concurrency: int,
  on_end: Callable[[], object],
) -> Heard:
  heard, waiting, ended = Heard(engine), deque(prompts), 0
  scheduler = Scheduler(engine, queue_limit=concurrency, observer=heard)
  settings = Settings(max_new_tokens=new_tokens, stop_ids=())
  arrived = 0
  while ended < len(prompts):
    while waiting and arrived - ended < concurrency:
      scheduler.submit([Job(waiting.popleft(), settings, emit=lambda event: None)])
      arrived += 1
    scheduler.step()
    while ended < len(heard.reasons):
      if heard.reasons[ended] != "length":
        raise InputError(f"end-to-end: an answer ended early: {heard.reasons[ended]}")
      ended += 1
      on_end()
  return heard
