"""Decides which job is answered when: one thread owns the engine and goes round.

A round ends what was cancelled, is overdue or has stopped; lets waiting jobs in while both resources last, a
slot and pages; reads one chunk of one prompt; and decodes one step of every answer. So a long prompt costs
the others a chunk's time a token, and nothing runs further ahead of the host than one step. Where pages run
out, the youngest job of that rank gives its slot back and goes on later from where it was, so that the
oldest always gets on. Whatever goes wrong with one job ends that job.
"""

import bisect
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from MaxText.common.errors import InputError, UserError
from MaxText.inference.engine import Engine
from MaxText.inference.engine_programs import NO_TOKEN, Picked
from MaxText.inference.serving import (
  DrainingError,
  Ended,
  Event,
  Job,
  Observer,
  QueueFullError,
  Reason,
  Snapshot,
  Ticket,
  Token,
  Tokens,
)

_LOGGER = logging.getLogger("MaxText")
_MOST_RETRY_SECONDS = 60
_REMEMBERED = 0.9  # weight of earlier jobs in the running mean of their time


class Scheduler:
  """The queue in front of an engine, and the thread that serves it.

  Attributes:
    snapshot: where it stood after its last round.
    is_ready: every program is compiled.
  """

  def __init__(self, engine: Engine, *, queue_limit: int = 64, observer: Observer | None = None):
    """Takes over `engine`, which nothing else may touch from now on.

    Args:
      engine: without requests.
      queue_limit: most jobs that wait.
      observer: hears what happens, in the thread in which it happens.
    """
    self._engine = engine
    self._queue_limit = queue_limit
    self._observer = observer or Observer()
    self._condition = threading.Condition()  # its lock can be taken again by its holder
    self._waiting: list[Ticket] = []  # in order of arrival; guarded by the condition, as are the flags
    self._is_draining = self._is_stopping = False
    self.is_ready = True
    self._on_ready: Callable[[], None] = lambda: None
    self._reading: deque[Ticket] = deque()
    self._decoding: list[Ticket] = []
    self._taken = self._rounds = 0
    self._job_seconds = 1.0
    self._thread: threading.Thread | None = None
    self._is_idle = threading.Event()
    self._is_idle.set()
    self.snapshot = self._snapshot()

  # --- from any thread --------------------------------------------------------------------------------------

  def submit(self, jobs: Sequence[Job]) -> list[Ticket]:
    """Takes all of `jobs` into the queue, or none.

    Raises:
      InputError: the engine could never hold one of them.
      QueueFullError: they do not fit into the queue now.
      DrainingError: no more jobs are taken.
    """
    for job in jobs:
      self._engine.check(len(job.ids), job.settings.stop_ids or ())
    with self._condition:
      self.check_open(len(jobs))
      tickets = [Ticket(job, self._taken + index) for index, job in enumerate(jobs)]
      self._taken += len(jobs)
      self._waiting += tickets
      self._is_idle.clear()
      for job in jobs:
        self._observer.accepted(len(job.ids))
      self._condition.notify()
    return tickets

  def check_open(self, count: int) -> None:
    """Refuses `count` jobs that cannot be taken now, before anybody prepares them.

    Raises:
      InputError: they are more than the queue ever holds.
      QueueFullError: they do not fit into the queue.
      DrainingError: no more jobs are taken, or none yet.
    """
    if count > self._queue_limit:
      raise InputError(f"{count} answers at once, but at most {self._queue_limit} may wait")
    with self._condition:
      if self._is_draining or not self.is_ready:
        self._observer.refused("draining" if self._is_draining else "warming_up", count)
        what = "shutting down" if self._is_draining else "compiling its programs"
        raise DrainingError(f"the server is {what}; try again later", _MOST_RETRY_SECONDS)
      waiting = len(self._waiting)
      if waiting + count > self._queue_limit:
        self._observer.refused("queue_full", count)
        message = f"{waiting} requests wait already, at most {self._queue_limit} may; try again later"
        raise QueueFullError(message, self._retry_seconds(waiting))

  def cancel(self, ticket: Ticket) -> None:
    """Ends a job at the beginning of the next round, if it has not ended yet."""
    ticket.is_cancelled = True

  def now(self) -> Snapshot:
    """Returns where it stands: slots and pages after the last round, the queue at this moment."""
    with self._condition:
      return dataclasses.replace(self.snapshot, waiting=len(self._waiting), is_draining=self._is_draining)

  @property
  def is_alive(self) -> bool:
    """Whether the thread goes round."""
    return self._thread is not None and self._thread.is_alive()

  def start(self, *, warm_up: bool = False, on_ready: Callable[[], None] = lambda: None) -> None:
    """Starts the thread.

    Args:
      warm_up: first compile every program; until then no job is taken.
      on_ready: called when that is done.
    """
    self.is_ready, self._on_ready = not warm_up, on_ready
    self._thread = threading.Thread(target=self._serve, name="scheduler", daemon=True)
    self._thread.start()

  def drain(self, seconds: float) -> bool:
    """Takes no more jobs, lets those that it has end, and stops the thread.

    Args:
      seconds: how long they may take; then the rest of them end as they are.

    Returns:
      whether all of them could end by themselves.
    """
    self.refuse()
    is_done = self._is_idle.wait(seconds)
    with self._condition:
      self._is_stopping = True
      self._condition.notify()
    if self._thread is not None:
      self._thread.join()
    return is_done

  def refuse(self) -> None:
    """Takes no more jobs from now on."""
    with self._condition:
      self._is_draining = True

  def _retry_seconds(self, waiting: int) -> int:
    slots = self.snapshot.used_slots + self.snapshot.free_slots
    return max(1, min(_MOST_RETRY_SECONDS, math.ceil(self._job_seconds * waiting / slots)))

  # --- the thread that owns the engine ----------------------------------------------------------------------

  def _serve(self) -> None:
    try:
      self._go_round()
    except Exception:
      _LOGGER.exception("the scheduler cannot go on")
      self.refuse()
      for ticket in self._all():
        ticket.slot = None  # the engine is not asked again
        self._leave(ticket, "error")
      self._is_idle.set()

  def _go_round(self) -> None:
    if not self.is_ready:
      self._engine.warm_up()
      self.is_ready = True
      self._on_ready()
    while True:
      with self._condition:
        while not self._waiting and not self._is_busy and not self._is_stopping:
          self._condition.wait()
        if self._is_stopping:
          break
      self.step()
    for ticket in self._all():
      self._leave(ticket, "shutdown")
    self._publish()

  def step(self) -> bool:
    """Goes one round; returns whether any job is left. Call it only where no thread was started."""
    try:
      self._end_unwanted()
      self._admit()
      self._read_chunk()
      self._decode()
    except Exception:
      self._recover()
    self._rounds += 1
    return self._publish()

  @property
  def _is_busy(self) -> bool:
    return bool(self._reading or self._decoding)

  def _all(self) -> list[Ticket]:
    with self._condition:
      return [*self._decoding, *self._reading, *self._waiting]

  def _end_unwanted(self) -> None:
    now = time.monotonic()
    for ticket in self._all():
      if ticket.is_cancelled:
        self._leave(ticket, "cancelled")
      elif ticket.job.deadline is not None and now >= ticket.job.deadline:
        self._leave(ticket, "deadline")

  def _admit(self) -> None:
    """Lets jobs in by their arrival; the first that does not fit holds up the others: none starves."""
    while True:
      with self._condition:
        ticket = self._waiting[0] if self._waiting else None
      if ticket is None or not self._contained(ticket, self._enter):
        return

  def _enter(self, ticket: Ticket) -> bool:
    job, paused = ticket.job, ticket.paused
    if not self._has_room((len(job.ids) if paused is None else paused.length) + 1):
      return False
    if paused is None:
      slot = self._engine.insert(len(job.ids), job.settings, job.settings.stop_ids or ())
    else:
      slot = self._engine.import_slot(paused)
    if slot is None:
      return False
    with self._condition:
      self._waiting.remove(ticket)
    ticket.slot, ticket.rank, ticket.paused = slot, self._engine.resources.rank(slot), None
    if paused is None:
      ticket.read = 0
      self._reading.append(ticket)
    else:
      self._decoding.append(ticket)
    return True

  def _has_room(self, tokens: int) -> bool:
    """Whether a job may enter and leave a page for each of its rank that may grow; else it is soon out."""
    resources = self._engine.resources
    rank = resources.choice(tokens)
    if rank is None:
      return False
    growing = sum(t.rank == rank and self._may_grow(t) for t in (*self._reading, *self._decoding))
    return resources.free_pages_of(rank) >= resources.pages_for(tokens) + growing

  def _may_grow(self, ticket: Ticket) -> bool:
    """Whether a running job can still ask for a page that it does not own."""
    engine, job = self._engine, ticket.job
    # the last token picked is never read; a dispatch wants room for all its steps, wherever the answer ends
    most = len(job.ids) + job.settings.max_new_tokens - 2 + engine.steps
    needed = engine.resources.pages_for(min(most, engine.max_target_length))
    return needed > len(engine.resources.owned(ticket.slot))

  def _read_chunk(self) -> None:
    """Reads one chunk of one prompt; the prompts take turns, so that a short one passes a long one."""
    if self._reading:
      ticket = self._reading.popleft()
      self._reading.append(ticket)
      self._contained(ticket, self._read)

  def _read(self, ticket: Ticket) -> None:
    ids = ticket.job.ids[ticket.read : ticket.read + self._engine.prefill_chunk_size]
    self._engine.prefill_chunk(ticket.slot, ids)
    ticket.read += len(ids)
    if ticket.read == len(ticket.job.ids):
      self._reading.remove(ticket)
      self._decoding.append(ticket)
      self._take(ticket, self._engine.begin(ticket.slot))

  def _decode(self) -> None:
    self._make_room()
    if self._decoding:
      picked = self._engine.decode()
      for ticket in list(self._decoding):
        self._contained(ticket, lambda ticket: self._take(ticket, picked))

  def _make_room(self) -> None:
    """Gives every answer the pages of its next step, the oldest first; the youngest pay for it."""
    for ticket in sorted(self._decoding, key=lambda ticket: ticket.number):
      while ticket.slot is not None and not self._engine.grow(ticket.slot, self._engine.steps):
        holders = [t for t in (*self._decoding, *self._reading) if t.rank == ticket.rank]
        self._pause(max(holders, key=lambda ticket: ticket.number))

  def _pause(self, ticket: Ticket) -> None:
    """Takes a job out; an answer keeps its state for later, and a prompt is read again."""
    if ticket in self._decoding:
      ticket.paused = self._engine.export_slot(ticket.slot)
    self._release(ticket)
    ticket.read = 0
    with self._condition:
      bisect.insort(self._waiting, ticket, key=lambda ticket: ticket.number)
    self._observer.preempted()

  def _take(self, ticket: Ticket, picked: Picked) -> None:
    """Hands out what a job's slot picked, and ends the job if that was the last of it."""
    slot, job = ticket.slot, ticket.job
    columns = np.flatnonzero(picked.token[slot] != NO_TOKEN)
    tokens = []
    for column in columns:
      tokens.append(self._token(job, picked, column, slot))
      if job.reader is not None and job.reader.is_stopped:
        break
    self._count(ticket, len(tokens))
    if tokens:
      job.emit(Tokens(tuple(tokens)))
    if job.reader is not None and job.reader.is_stopped:
      self._leave(ticket, "stop")
    elif not self._engine.active[slot]:
      is_stop = bool(tokens) and tokens[-1].id in (job.settings.stop_ids or ())
      self._leave(ticket, _reason(is_stop, bool(self._engine.finite()[slot])))

  def _token(self, job: Job, picked: Picked, column: int, slot: int) -> Token:
    token, top = int(picked.token[slot, column]), ()
    if wanted := job.settings.logprobs:
      arrays = (picked.top_ids, picked.top_logprobs)
      top = tuple(zip(*(each[slot, column, :wanted].tolist() for each in arrays)))
    pieces = () if job.reader is None else tuple(job.reader.push(token))
    return Token(token, float(picked.logprob[slot, column]), top, pieces)

  def _count(self, ticket: Ticket, count: int) -> None:
    if not count:
      return
    now = time.monotonic()
    if ticket.last_token is None:
      self._observer.first_token(now - ticket.job.arrived)
    self._observer.tokens(count, None if ticket.last_token is None else now - ticket.last_token)
    ticket.token_count += count
    ticket.last_token = now

  # --- endings ----------------------------------------------------------------------------------------------

  def _leave(self, ticket: Ticket, reason: Reason) -> None:
    """Ends a job; what it held is free before anyone hears of it."""
    if ticket.ended is not None:
      return
    self._release(ticket)
    with self._condition:
      if ticket in self._waiting:
        self._waiting.remove(ticket)
    ticket.ended, ticket.paused = reason, None
    seconds = time.monotonic() - ticket.job.arrived
    self._job_seconds = _REMEMBERED * self._job_seconds + (1 - _REMEMBERED) * seconds
    self.snapshot = self._snapshot()
    self._observer.finished(reason, seconds)
    try:
      pieces = () if ticket.job.reader is None else tuple(ticket.job.reader.end(reason))
    except Exception:
      _LOGGER.exception("job %d: the reader fails at the end of its answer", ticket.number)
      pieces = ()
    self._tell(ticket, Ended(reason, pieces))

  def _tell(self, ticket: Ticket, event: Event) -> None:
    try:
      ticket.job.emit(event)
    except Exception:
      _LOGGER.exception("job %d: nobody takes its last event", ticket.number)

  def _release(self, ticket: Ticket) -> None:
    if ticket.slot is None:
      return
    slot, ticket.slot, ticket.rank = ticket.slot, None, None
    if ticket in self._decoding:
      self._decoding.remove(ticket)
    if ticket in self._reading:
      self._reading.remove(ticket)
    self._engine.reset_slot(slot)

  def _contained(self, ticket: Ticket, act: Callable[[Ticket], bool | None]) -> bool:
    """Does one thing for a job; what fails ends the job alone, unless the engine's own state is lost."""
    try:
      return bool(act(ticket))
    except Exception as failure:
      if not self._engine.is_intact:
        raise
      if not isinstance(failure, UserError):
        _LOGGER.exception("job %d fails", ticket.number)
      self._leave(ticket, "error")
      return True

  def _recover(self) -> None:
    """Starts the engine again after a failure that none of its jobs survives; those that wait do."""
    _LOGGER.exception("the engine fails; it starts again without the jobs in its slots")
    self._engine.restart()  # where this fails, too, `_serve` ends every job
    lost = [*self._decoding, *self._reading]
    self._decoding.clear()
    self._reading.clear()
    for ticket in lost:
      ticket.slot = ticket.rank = None
      self._leave(ticket, "error")

  def _publish(self) -> bool:
    self.snapshot = self._snapshot()
    with self._condition:
      is_left = self._is_busy or bool(self._waiting)
      if not is_left:
        self._is_idle.set()
    return is_left

  def _snapshot(self) -> Snapshot:
    resources = self._engine.resources
    return Snapshot(
      waiting=len(self._waiting),
      reading=len(self._reading),
      decoding=len(self._decoding),
      used_slots=resources.used_slots,
      free_slots=resources.free_slots,
      used_pages=resources.used_pages,
      free_pages=resources.free_pages,
      rounds=self._rounds,
      is_draining=self._is_draining,
    )


def _reason(is_stop: bool, is_finite: bool) -> Reason:
  if not is_finite:
    return "not_finite"
  return "stop" if is_stop else "length"
