"""What the server counts, in the format of Prometheus; needs the extra [serve].

Times begin at a request's arrival, its wait in the queue included.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from MaxText.inference.serving import REASONS, Observer, Reason, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REFUSALS = ("queue_full", "draining", "warming_up")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics(Observer):
  """Counters and histograms of one server, in a registry of their own."""

  def __init__(self):
    """Starts at zero, with every label already there."""
    self._registry = registry = CollectorRegistry(auto_describe=True)
    self._accepted = Counter("maxtext_requests", "Requests taken into the queue", registry=registry)
    self._refused = Counter(
      "maxtext_requests_refused", "Requests that were not taken", ["reason"], registry=registry
    )
    self._finished = Counter(
      "maxtext_requests_finished", "Requests that ended", ["reason"], registry=registry
    )
    self._prompt = Counter("maxtext_prompt_tokens", "Tokens of accepted prompts", registry=registry)
    self._generated = Counter("maxtext_generated_tokens", "Tokens that were picked", registry=registry)
    self._not_finite = Counter(
      "maxtext_not_finite", "Requests ended by logits that were NaN or infinite", registry=registry
    )
    self._preempted = Counter(
      "maxtext_preemptions", "Times that a request gave its slot back and waited to go on", registry=registry
    )
    histogram = lambda name, text, buckets: Histogram(name, text, buckets=buckets, registry=registry)
    self._first = histogram("maxtext_time_to_first_token_seconds", "From arrival to first token", _LONG)
    self._between = histogram(
      "maxtext_inter_token_seconds", "From one token of a request to the next", _SHORT
    )
    self._whole = histogram("maxtext_request_seconds", "From arrival to the end", _LONG)
    for reason in REASONS:
      self._finished.labels(reason)
    for reason in REFUSALS:
      self._refused.labels(reason)

  def watch(self, snapshot: Callable[[], Snapshot]) -> None:
    """Adds the gauges, read from `snapshot` at every scrape."""
    self._registry.register(_Gauges(snapshot))

  def exposition(self) -> bytes:
    """Returns all of it as Prometheus reads it."""
    return generate_latest(self._registry)

  def refused(self, reason: str, count: int) -> None:
    """Counts requests that were not taken."""
    self._refused.labels(reason).inc(count)

  def accepted(self, prompt_tokens: int) -> None:
    """Counts a request and its prompt."""
    self._accepted.inc()
    self._prompt.inc(prompt_tokens)

  def first_token(self, seconds: float) -> None:
    """Notes the time to a request's first token."""
    self._first.observe(seconds)

  def tokens(self, count: int, seconds: float | None) -> None:
    """Counts new tokens; those of one step share the time since the last one."""
    self._generated.inc(count)
    if seconds is not None:
      for _ in range(count):
        self._between.observe(seconds / count)

  def preempted(self) -> None:
    """Counts a request that has to pause."""
    self._preempted.inc()

  def finished(self, reason: Reason, seconds: float) -> None:
    """Counts an end and its reason."""
    self._finished.labels(reason).inc()
    self._whole.observe(seconds)
    if reason == "not_finite":
      self._not_finite.inc()


class _Gauges:
  """The state of queue, slots and pages at the moment of a scrape."""

  def __init__(self, snapshot: Callable[[], Snapshot]):
    self._snapshot = snapshot

  def collect(self) -> Iterator[Metric]:
    now = self._snapshot()
    running = now.reading + now.decoding
    for name, text, value in (
      ("maxtext_requests_waiting", "Requests without a slot", now.waiting),
      ("maxtext_requests_running", "Requests with a slot", running),
      ("maxtext_requests_reading", "Requests whose prompt is being read", now.reading),
      ("maxtext_slots_used", "Slots (recurrent state) with a request", now.used_slots),
      ("maxtext_slots_free", "Slots without a request", now.free_slots),
      ("maxtext_pages_used", "Pages (latents) with an owner", now.used_pages),
      ("maxtext_pages_free", "Pages without an owner", now.free_pages),
      ("maxtext_draining", "1 while no more requests are taken", int(now.is_draining)),
    ):
      yield GaugeMetricFamily(name, text, value)

  def describe(self) -> list[Metric]:
    return []
