"""What goes into the scheduler and what comes out of it: jobs, events, readers, observers, refusals."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from MaxText.inference.engine import Exported
from MaxText.inference.prompts import Settings

Reason = Literal["stop", "length", "cancelled", "deadline", "not_finite", "error", "shutdown"]
REASONS: tuple[Reason, ...] = ("stop", "length", "cancelled", "deadline", "not_finite", "error", "shutdown")


@dataclasses.dataclass(frozen=True)
class Token:
  """One token of an answer.

  Attributes:
    id: which.
    logprob: its log-probability under the model's own distribution.
    top: (id, log-probability) of the likeliest tokens, as many as the job wants.
    pieces: what the job's reader made of it.
  """

  id: int
  logprob: float
  top: tuple[tuple[int, float], ...] = ()
  pieces: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Tokens:
  """An answer grows."""

  tokens: tuple[Token, ...]


@dataclasses.dataclass(frozen=True)
class Ended:
  """An answer ends; nothing comes after this, and the job holds no slot and no page any more.

  Attributes:
    reason: "stop" and "length" are whole answers.
    pieces: what the job's reader had held back.
  """

  reason: Reason
  pieces: tuple[Any, ...] = ()


Event = Tokens | Ended


class Reader(Protocol):
  """Turns the tokens of one answer into what its receiver wants, and finds its stop strings.

  Attributes:
    is_stopped: the answer is over, because a stop string came up.
  """

  is_stopped: bool

  def push(self, token: int) -> Sequence[Any]:
    """Takes one token and returns what it completes."""

  def end(self, reason: Reason) -> Sequence[Any]:
    """Ends the answer and returns what was held back."""


@dataclasses.dataclass(frozen=True)
class Job:
  """One prompt to answer.

  Attributes:
    ids: the prompt.
    settings: how to answer, already checked, with the stop ids.
    emit: takes the events, in the scheduler's thread; it must not wait.
    reader: None where token ids are all that is wanted.
    deadline: reading of `time.monotonic` at which the answer ends, whatever it has come to.
    arrived: the same of its arrival, from which the time to the first token counts.
  """

  ids: Sequence[int]
  settings: Settings
  emit: Callable[[Event], None]
  reader: Reader | None = None
  deadline: float | None = None
  arrived: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(eq=False)
class Ticket:
  """A job on its way; what `submit` returns and `cancel` takes.

  Attributes:
    job: what was asked.
    number: order of arrival.
    slot: where it runs, None while it waits.
    rank: part of the data axis that holds its state, None while it waits.
    read: prompt tokens that are in memory.
    paused: its state, while it waits to go on.
    token_count: tokens picked so far.
    last_token: reading of `time.monotonic` at the last of them.
    is_cancelled: nobody wants the answer any more.
    ended: why it ended.
  """

  job: Job
  number: int
  slot: int | None = None
  rank: int | None = None
  read: int = 0
  paused: Exported | None = None
  token_count: int = 0
  last_token: float | None = None
  is_cancelled: bool = False
  ended: Reason | None = None


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """Where the scheduler stands between two rounds.

  Attributes:
    waiting: jobs without a slot, those that had to give theirs back included.
    reading: jobs whose prompt is being read.
    decoding: jobs that get tokens.
    used_slots: slots with a job.
    free_slots: the others.
    used_pages: pages that some job holds.
    free_pages: the others.
    rounds: rounds so far.
    is_draining: no more jobs are taken.
  """

  waiting: int
  reading: int
  decoding: int
  used_slots: int
  free_slots: int
  used_pages: int
  free_pages: int
  rounds: int = 0
  is_draining: bool = False


class Observer:
  """Hears what happens to jobs; this one takes no note of it."""

  def refused(self, reason: str, count: int) -> None:
    """Hears that `count` jobs were not taken, for "queue_full" or "draining"."""

  def accepted(self, prompt_tokens: int) -> None:
    """Hears that a job waits."""

  def first_token(self, seconds: float) -> None:
    """Hears the time from a job's arrival to its first token."""

  def tokens(self, count: int, seconds: float | None) -> None:
    """Hears of new tokens, and of the time since the job's last one, None for its first."""

  def preempted(self) -> None:
    """Hears that a job gave its slot back and waits to go on."""

  def finished(self, reason: Reason, seconds: float) -> None:
    """Hears that a job ended, and how long after its arrival."""


class RefusedError(Exception):
  """No job is taken now.

  Attributes:
    retry_after: seconds after which it is worth another try.
  """

  def __init__(self, message: str, retry_after: int):
    super().__init__(message)
    self.retry_after = retry_after


class QueueFullError(RefusedError):
  """As many jobs wait as may."""


class DrainingError(RefusedError):
  """The scheduler finishes what it has and takes nothing more."""
