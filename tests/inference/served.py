"""A server on a free port of this machine, for tests that speak to it through its clients.

A test file that imports this is skipped where the extra [serve] or a client is not installed.
"""

import contextlib
import re
import socket
import threading
import time

import pytest

httpx, openai, uvicorn, *_ = (
  pytest.importorskip(name, reason=f"{name} of the extras [serve] and [dev] is not installed")
  for name in ("httpx", "openai", "uvicorn", "fastapi", "prometheus_client")
)

# ruff: noqa: E402  (these import the extra)
from MaxText.inference.metrics import Metrics
from MaxText.inference.openai_jobs import ServedModel
from MaxText.inference.openai_server import Limits, create_app
from MaxText.inference.scheduler import Scheduler
from MaxText.tokenizers.chat.formats import chat_format


class Served:
  """A running server.

  Attributes:
    engine: that it answers with.
    scheduler: in front of it.
    url: where it listens.
    client: of OpenAI's own package, without retries.
    tokenizer: of the model.
  """

  def __init__(self, engine, tokenizer, stop_ids, *, queue_limit=8, api_key=None, seconds=30.0, body=65536):
    self.engine, self.tokenizer = engine, tokenizer
    self.metrics = Metrics()
    self.scheduler = Scheduler(engine, queue_limit=queue_limit, observer=self.metrics)
    self.metrics.watch(self.scheduler.now)
    self.model = ServedModel(
      "tiny",
      tokenizer,
      chat_format(tokenizer),
      tokenizer.vocab_size,
      tuple(stop_ids),
      engine.max_target_length,
      7,
    )
    self.app = create_app(self.model, self.scheduler, self.metrics, Limits(body, seconds, api_key))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", lifespan="off"))
    self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
    self.client = self.new_client(api_key or "unused")

  def new_client(self, api_key):
    return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)

  def start(self):
    self.scheduler.start(warm_up=True)
    self._thread.start()
    wait_until(lambda: self._server.started and self.scheduler.is_ready, seconds=240)
    return self

  def stop(self):
    self.scheduler.drain(5)
    self._server.should_exit = True
    self._thread.join(10)
    resources = self.engine.resources
    assert resources.used_slots == resources.used_pages == 0


@contextlib.contextmanager
def serving(engine, tokenizer, stop_ids, **limits):
  """Runs a server, and checks at its end that all slots and pages are free."""
  served = Served(engine, tokenizer, stop_ids, **limits).start()
  try:
    yield served
  finally:
    served.stop()


def sample(metrics, name):
  """One sample of the metrics, by its name with its labels."""
  text = metrics.exposition().decode()
  return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def wait_until(holds, seconds=10.0):
  """Waits for something that another thread does."""
  end = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < end
    time.sleep(0.005)
