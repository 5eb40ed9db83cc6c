"""The scheduler against the solo run of each job: same tokens, whoever comes, goes, pauses or fails."""

import collections
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from MaxText.common.errors import InputError
from MaxText.inference.prompts import Settings
from MaxText.inference.scheduler import Scheduler
from MaxText.inference.serving import DrainingError, Ended, Job, Observer, QueueFullError, Tokens
from tests.inference.scripted_engine import ScriptedEngine
from tests.inference.small_engine import LENGTHS, LONGEST, NEW, make_engine

pytestmark = pytest.mark.usefixtures("kept_programs")
GREEDY = Settings(max_new_tokens=NEW, stop_ids=())
PAGE_SIZE, PAGES = 2, 52  # four long requests may enter, and their answers do not fit beside each other


class Counts(Observer):
  """The truth about what happened, as the scheduler tells it."""

  def __init__(self):
    self.heard = collections.Counter()

  def preempted(self):
    self.heard["preempted"] += 1

  def finished(self, reason, seconds):
    self.heard[reason] += 1

  def refused(self, reason, count):
    self.heard[reason] += count


class Receiver:
  """Takes the events of one job, and looks at the resources at each of them."""

  def __init__(self, engine=None):
    self.tokens, self.ended, self._engine = [], None, engine
    self.done = threading.Event()

  def __call__(self, event):
    assert self.ended is None
    if self._engine is not None:
      assert_whole(self._engine)
    if isinstance(event, Tokens):
      self.tokens += [token.id for token in event.tokens]
    else:
      self.ended = event.reason
      self.done.set()


def assert_whole(engine):
  """Free and used resources are all that there are, and no page has two owners."""
  resources = engine.resources
  owned = [
    (resources.rank(slot), page)
    for slot in range(4)
    if slot in resources._owned
    for page in resources.owned(slot)
  ]
  assert resources.free_slots + resources.used_slots == 4
  assert resources.free_pages + len(owned) == PAGES and len(set(owned)) == len(owned)


@pytest.fixture(scope="module")
def engine(directory):
  made = make_engine(directory, pages=PAGES, page_size=PAGE_SIZE, steps=1)
  made.warm_up()
  return made


@pytest.fixture
def scheduler(engine):
  made = Scheduler(engine, queue_limit=16, observer=Counts())
  yield made
  assert engine.resources.used_slots == 0
  assert_whole(engine)


def submit(scheduler, request, engine=None, **settings):
  receiver = Receiver(engine)
  job = Job(request[0], dataclasses.replace(GREEDY, **settings), receiver)
  return scheduler.submit([job])[0], receiver


def run(scheduler):
  while scheduler.step():
    pass


def test_500_events_give_the_solo_answers(scheduler, engine, requests):
  """16 jobs of unequal length at a time on 4 slots, arriving and leaving at random."""
  rng, events, live, answered = np.random.default_rng(8), 0, [], 0
  programs = engine.program_count
  while events < 500:
    kind = rng.choice(["submit", "submit", "step", "step", "step", "cancel"])
    if kind == "submit" and len(live) < 16:
      number = int(rng.integers(len(LENGTHS)))
      live.append((number, *submit(scheduler, requests[number], engine)))
    elif kind == "cancel" and live and rng.random() < 0.3:
      scheduler.cancel(live[int(rng.integers(len(live)))][1])
    else:
      scheduler.step()
    events += 1
    assert_whole(engine)
    for number, _, receiver in live:
      assert receiver.tokens == requests[number][1][: len(receiver.tokens)]
    answered += sum(receiver.ended == "length" for _, _, receiver in live)
    live = [each for each in live if each[2].ended is None]
  run(scheduler)
  for number, ticket, receiver in live:
    assert receiver.ended == ("cancelled" if ticket.is_cancelled else "length")
    assert receiver.ended == "cancelled" or receiver.tokens == requests[number][1]
  heard = scheduler._observer.heard
  assert answered >= 30 and heard["cancelled"] >= 5 and heard["preempted"] >= 3
  assert heard["error"] == heard["not_finite"] == 0
  assert engine.program_count == programs  # nothing compiles after the warm-up


def test_pausing_and_going_on_does_not_change_an_answer(scheduler, engine, requests):
  """Four prompts fit beside each other, and their answers do not."""
  numbers = [LENGTHS.index(length) for length in (40, 15, 16, 15)]
  started = [submit(scheduler, requests[number], engine) for number in numbers]
  run(scheduler)
  assert scheduler._observer.heard["preempted"] >= 1
  for number, (_, receiver) in zip(numbers, started):
    assert receiver.tokens == requests[number][1] and receiver.ended == "length"


def test_a_long_prompt_does_not_stop_the_others(scheduler, requests):
  short, long = requests[LENGTHS.index(2)], requests[LENGTHS.index(40)]
  _, first = submit(scheduler, short)
  scheduler.step()
  _, slow = submit(scheduler, long)
  _, late = submit(scheduler, short)
  for count in (3, 4):  # both rounds read a chunk of a prompt and decode
    scheduler.step()
    assert len(first.tokens) == count
  assert late.tokens and not slow.tokens  # the short prompt has passed the long one
  run(scheduler)
  assert (slow.tokens, late.tokens, first.tokens) == (long[1], short[1], short[1])


def test_a_cancelled_job_is_out_at_the_next_round(scheduler, engine, requests):
  ticket, receiver = submit(scheduler, requests[3])
  scheduler.step()
  got = len(receiver.tokens)
  assert got and engine.resources.used_slots == 1
  scheduler.cancel(ticket)
  scheduler.step()
  assert receiver.ended == "cancelled" and len(receiver.tokens) == got
  assert engine.resources.used_slots == 0


def test_what_is_overdue_ends_waiting_or_running(scheduler, requests):
  receivers = [Receiver() for _ in range(5)]
  past = time.monotonic() + 0.05
  scheduler.submit([Job(requests[5][0], GREEDY, each, deadline=past) for each in receivers])
  scheduler.step()
  time.sleep(0.06)
  scheduler.step()
  assert [each.ended for each in receivers] == ["deadline"] * 5
  assert sum(bool(each.tokens) for each in receivers) == 1


def test_one_job_more_than_there_are_slots_waits(scheduler, requests):
  started = [submit(scheduler, requests[0]) for _ in range(5)]
  scheduler.step()
  assert (scheduler.snapshot.used_slots, scheduler.snapshot.waiting) == (4, 1)
  run(scheduler)
  assert [receiver.ended for _, receiver in started] == ["length"] * 5


def test_a_full_queue_refuses_all_of_a_submission(scheduler, requests):
  for _ in range(16):
    submit(scheduler, requests[0])
  with pytest.raises(QueueFullError, match="16 requests wait already, at most 16") as refusal:
    submit(scheduler, requests[0])
  assert refusal.value.retry_after >= 1
  assert scheduler._observer.heard["queue_full"] == 1
  run(scheduler)
  assert scheduler._observer.heard["length"] == 16


def test_what_the_engine_could_never_hold_is_refused_at_once(scheduler):
  with pytest.raises(InputError, match="64 tokens, but a request holds 64"):
    scheduler.submit([Job([1] * LONGEST, GREEDY, Receiver())])
  assert scheduler.now().waiting == 0


def test_a_stop_id_is_told_from_the_limit(scheduler, requests):
  prompt, want = requests[5]
  _, receiver = submit(scheduler, requests[5], stop_ids=(want[3],))
  run(scheduler)
  assert receiver.ended == "stop" and receiver.tokens == want[: want.index(want[3]) + 1]


class Broken:
  """A reader that fails at the second token."""

  is_stopped = False
  count = 0

  def push(self, token):
    self.count += 1
    if self.count == 2:
      raise ValueError("no such token")
    return ()

  def end(self, reason):
    return ()


def failing_emit(event):
  raise OSError("nobody listens")


@pytest.mark.parametrize("spoil", ["reader", "emit", "settings"])
def test_a_job_that_fails_fails_alone(scheduler, requests, spoil):
  _, healthy = submit(scheduler, requests[3])
  sick = Receiver()
  jobs = {
    "reader": Job(requests[2][0], GREEDY, sick, reader=Broken()),
    "emit": Job(requests[2][0], GREEDY, failing_emit),
    "settings": Job(requests[2][0], dataclasses.replace(GREEDY, seed=-1), sick),  # unchecked
  }
  scheduler.submit([jobs[spoil]])
  run(scheduler)
  assert healthy.tokens == requests[3][1]
  assert scheduler._observer.heard == {"length": 1, "error": 1}
  assert spoil == "emit" or sick.ended == "error"


def test_an_engine_that_fails_starts_again(scheduler, engine, requests, monkeypatch):
  """Its state is consumed: what was in the slots is lost, what waits is answered."""
  started = [submit(scheduler, requests[2]) for _ in range(6)]
  scheduler.step()
  before = [receiver for _, receiver in started if receiver.tokens]
  healthy = engine.decode

  def broken(limit=None):
    monkeypatch.setattr(engine, "decode", healthy)
    for leaf in jax.tree.leaves(engine._state):
      leaf.delete()
    raise RuntimeError("out of memory")

  monkeypatch.setattr(engine, "decode", broken)
  run(scheduler)
  assert before and all(receiver.ended == "error" for receiver in before)
  assert scheduler._observer.heard["error"] == 4  # the slots
  rest = [receiver for _, receiver in started if receiver.ended == "length"]
  assert len(rest) == 2 and all(receiver.tokens == requests[2][1] for receiver in rest)


def test_an_engine_that_cannot_start_again_leaves_nobody_waiting():
  engine = ScriptedEngine()
  engine.answers = [[1] * 50]
  scheduler = Scheduler(engine, observer=Counts())
  started = [submit(scheduler, ([1, 2], None)) for _ in range(5)]

  def broken(*_):
    engine.is_intact = False
    raise RuntimeError("gone")

  engine.decode = engine.restart = broken
  scheduler.start()
  assert all(receiver.done.wait(60) and receiver.ended == "error" for _, receiver in started)
  scheduler._thread.join(60)
  with pytest.raises(DrainingError):
    submit(scheduler, ([1, 2], None))
  assert scheduler.drain(1) and not scheduler.is_alive


def test_a_nan_ends_its_own_job_and_leaves_nothing(scheduler, engine, requests):
  _, healthy = submit(scheduler, requests[7])
  ticket, sick = submit(scheduler, requests[3])
  while ticket.token_count < 2:
    scheduler.step()
  page = engine.resources.owned(ticket.slot)[0]
  pools = engine._state.pools
  layers = [
    dataclasses.replace(layer, latent=layer.latent.at[0, page].set(np.nan))
    if hasattr(layer, "latent")
    else layer
    for layer in pools.layers
  ]
  engine._state = dataclasses.replace(engine._state, pools=dataclasses.replace(pools, layers=tuple(layers)))
  run(scheduler)
  assert sick.ended == "not_finite" and sick.tokens == requests[3][1][: len(sick.tokens)]
  assert healthy.tokens == requests[7][1]
  assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(engine._state.pools))
  _, again = submit(scheduler, requests[3])
  run(scheduler)
  assert again.tokens == requests[3][1]


def test_the_thread_answers_and_drains(engine, requests):
  scheduler = Scheduler(engine, observer=Counts())
  scheduler.start()
  started = [submit(scheduler, requests[number]) for number in range(6)]
  assert scheduler.drain(60)
  assert [receiver.tokens for _, receiver in started] == [want for _, want in requests[:6]]
  with pytest.raises(DrainingError):
    submit(scheduler, requests[0])
  assert scheduler.snapshot.is_draining and engine.resources.used_slots == 0


def test_draining_ends_what_takes_too_long(engine, requests):
  scheduler = Scheduler(engine, observer=Counts())
  started = [submit(scheduler, requests[number]) for number in range(9)]
  scheduler.start()
  assert not scheduler.drain(0)
  assert all(receiver.done.wait(60) for _, receiver in started)
  assert {receiver.ended for _, receiver in started} <= {"length", "shutdown"}
  assert scheduler._observer.heard["shutdown"] and engine.resources.used_slots == 0


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("length", [16, 17, 40])
def test_as_many_requests_of_full_length_as_slots_run_at_once(length, steps):
  """A pool of just their pages: none of them waits for a spare page, and none is paused."""
  pages = 8 * -(-length // 16)
  engine = ScriptedEngine(slots=8, pages=pages, page_size=16, max_target_length=length, steps=steps)
  engine.answers = [[0] * 100]
  scheduler = Scheduler(engine, queue_limit=16, observer=Counts())
  started = [submit(scheduler, ([1] * (length - 8), None), max_new_tokens=8) for _ in range(16)]
  scheduler.step()
  assert (scheduler.snapshot.used_slots, scheduler.snapshot.waiting) == (8, 8)
  run(scheduler)
  assert scheduler._observer.heard == {"length": 16}
  assert all(len(receiver.tokens) == 8 for _, receiver in started)


def test_a_page_is_kept_for_a_job_that_may_grow_and_none_for_one_that_may_not():
  engine = ScriptedEngine(slots=2, pages=2, page_size=16, max_target_length=32)
  engine.answers = [[0] * 32]
  for new_tokens, together in ((9, 2), (10, 1)):  # the last token picked is never read: 8 + 9 - 1 fill a page
    scheduler = Scheduler(engine, observer=Counts())
    for _ in range(2):
      submit(scheduler, ([1] * 8, None), max_new_tokens=new_tokens)
    scheduler.step()
    assert scheduler.snapshot.used_slots == together
    run(scheduler)
    assert scheduler._observer.heard == {"length": 2}


def test_the_emptier_rank_is_chosen_and_what_it_lacks_is_paid_in_it():
  """Two ranks of two slots: jobs spread over both, and growth in one never takes from the other."""
  engine = ScriptedEngine(slots=4, pages=24, page_size=2, max_target_length=24, ranks=2)
  engine.answers = [[0] * 12]
  scheduler = Scheduler(engine, queue_limit=16, observer=Counts())
  prompt = ([1] * 8, None)
  started = [submit(scheduler, prompt, max_new_tokens=12) for _ in range(6)]
  scheduler.step()
  assert [ticket.rank for ticket, _ in started] == [0, 1, 0, 1, None, None]
  while scheduler.step():
    resources = engine.resources
    for rank in range(2):
      slots = [slot for slot in resources._owned if resources.rank(slot) == rank]
      assert resources.free_pages_of(rank) + sum(len(resources.owned(slot)) for slot in slots) == 12
    assert all(ticket.slot is None or resources.rank(ticket.slot) == ticket.rank for ticket, _ in started)
  assert scheduler._observer.heard["preempted"] >= 1
  assert all(receiver.ended == "length" and len(receiver.tokens) == 12 for _, receiver in started)


def test_the_last_event_comes_when_the_slot_is_free(scheduler, engine, requests):
  seen = []

  def emit(event):
    if isinstance(event, Ended):
      seen.append(engine.resources.used_slots)

  scheduler.submit([Job(requests[2][0], GREEDY, emit)])
  run(scheduler)
  assert seen == [0]
