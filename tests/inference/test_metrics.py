"""The metrics against a truth that the test counts itself, over a random run with every kind of event."""

import collections
import time

import numpy as np

from MaxText.inference.prompts import Settings
from MaxText.inference.scheduler import Scheduler
from MaxText.inference.serving import REASONS, DrainingError, Job, QueueFullError, Tokens
from tests.inference.scripted_engine import ScriptedEngine
from tests.inference.served import Metrics, sample


class Truth:
  """What clients saw."""

  def __init__(self):
    self.count = collections.Counter()
    self.first, self.times = {}, {}

  def receiver(self, number, arrived):
    def emit(event):
      if isinstance(event, Tokens):
        self.count["generated"] += len(event.tokens)
        self.first.setdefault(number, time.monotonic() - arrived)
      else:
        self.count[event.reason] += 1

    return emit


def test_metrics_equal_what_clients_saw():
  rng, truth, metrics = np.random.default_rng(4), Truth(), Metrics()
  engine = ScriptedEngine(slots=3, pages=8, page_size=4, max_target_length=32)
  pause, pauses = engine.export_slot, []
  engine.export_slot = lambda slot: pauses.append(slot) or pause(slot)
  engine.answers = [[7] * 30]
  scheduler = Scheduler(engine, queue_limit=5, observer=metrics)
  metrics.watch(scheduler.now)
  tickets = []
  for number in range(400):
    kind = rng.choice(["submit", "step", "step", "cancel", "break"], p=[0.3, 0.55, 0.05, 0.05, 0.05])
    if kind == "submit":
      length, arrived = int(rng.integers(1, 12)), time.monotonic()
      settings = Settings(max_new_tokens=int(rng.integers(1, 20)), stop_ids=(9,))
      deadline = arrived if rng.random() < 0.1 else None
      job = Job([1] * length, settings, truth.receiver(number, arrived), deadline=deadline, arrived=arrived)
      try:
        tickets += scheduler.submit([job])
        truth.count["accepted"] += 1
        truth.count["prompt"] += length
      except QueueFullError:
        truth.count["queue_full"] += 1
    elif kind == "cancel" and tickets:
      scheduler.cancel(tickets[int(rng.integers(len(tickets)))])
    elif kind == "break" and engine.active.any():
      engine.broken.add(int(np.flatnonzero(engine.active)[0]))
    else:
      scheduler.step()
    now = scheduler.now()
    told = {
      name: sample(metrics, f"maxtext_{name}") for name in ("requests_waiting", "slots_used", "pages_used")
    }
    assert told == {
      "requests_waiting": now.waiting,
      "slots_used": engine.resources.used_slots,
      "pages_used": engine.resources.used_pages,
    }
    assert sample(metrics, "maxtext_pages_free") + told["pages_used"] == 8
    assert sample(metrics, "maxtext_slots_free") + told["slots_used"] == 3
  while scheduler.step():
    pass
  scheduler.refuse()
  try:
    scheduler.submit([job])
  except DrainingError:
    truth.count["draining"] += 1
  assert min(truth.count[key] for key in ("length", "cancelled", "deadline", "not_finite", "queue_full")) >= 3
  assert pauses
  # prompts that were read again count as well
  assert sample(metrics, "maxtext_preemptions_total") >= len(pauses)
  assert_told(metrics, truth)


def assert_told(metrics, truth):
  count = truth.count
  want = {f'requests_finished_total{{reason="{reason}"}}': count[reason] for reason in REASONS} | {
    "requests_total": count["accepted"],
    "prompt_tokens_total": count["prompt"],
    "generated_tokens_total": count["generated"],
    "not_finite_total": count["not_finite"],
    'requests_refused_total{reason="queue_full"}': count["queue_full"],
    'requests_refused_total{reason="draining"}': 1,
    "time_to_first_token_seconds_count": len(truth.first),
    "inter_token_seconds_count": count["generated"] - len(truth.first),
    "request_seconds_count": sum(count[reason] for reason in REASONS),
    "draining": 1,
  }
  assert {name: sample(metrics, f"maxtext_{name}") for name in want} == want
  total = sample(metrics, "maxtext_time_to_first_token_seconds_sum")
  assert abs(total - sum(truth.first.values())) < 0.01 * len(truth.first)
