"""A JetStream server in a process of its own, which it may end by SIGKILL, and JetStream's client of it.

A test file that imports this is skipped where JetStream is not installed.
"""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

for name in ("jetstream", "grpc", "shortuuid"):
  pytest.importorskip(name, reason=f"{name} is not installed, so JetStream cannot run")

# ruff: noqa: E402  (these import JetStream)
import grpc

from MaxText.inference import jetstream_shim

ROOT = Path(__file__).parents[2]
JETSTREAM = jetstream_shim.load()
Request = JETSTREAM.messages.DecodeRequest
ECHO = """
import sys, time
sys.path.insert(0, {root!r})
from MaxText.inference import jetstream_server, loading
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference.echo_engine import STOP, EchoEngine
from tests.locations import TINY

def load_engine(*_, **__):
  time.sleep({loading})
  engine = EchoEngine(max_target_length=64)
  engine.seconds = {seconds}
  return loading.Loaded(engine, KimiTokenizer.from_directory(TINY), (STOP,))

loading.load_engine = load_engine
sys.exit(jetstream_server.main(["kimi-k3-tiny", "port=0", *sys.argv[1:]]))
"""
START_SECONDS = 300  # a real model is compiled meanwhile, maybe on a machine with other work
COMMAND = "import sys; from MaxText.inference import jetstream_server as s; sys.exit(s.main(sys.argv[1:]))"


class Answer(NamedTuple):
  """What a client has in the end: ids, text, and the error that came instead of the rest."""

  ids: list
  text: str
  code: grpc.StatusCode | None = None
  details: str = ""


def echo_program(*, seconds=0.002, loading=0):
  """The command around an `EchoEngine`; a step of it takes `seconds`, loading it `loading` seconds."""
  return ECHO.format(root=str(ROOT), seconds=seconds, loading=loading)


class Server:
  """A process that serves, and a client of it once `wait_for` has seen that it listens.

  Attributes:
    process: which may be gone.
    log: lines of its stderr.
    address: where it listens.
    channel: of the client.
    stub: JetStream's client.
  """

  def __init__(self, program, *arguments, env=None):
    command = [sys.executable, "-c", program, *arguments]
    self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    self.log, self.channel = [], None
    self._told, self._is_over = threading.Condition(), False
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self):
    for line in self.process.stderr:
      with self._told:
        self.log.append(line)
        self._told.notify_all()
    with self._told:
      self._is_over = True
      self._told.notify_all()

  def wait_for(self, words, seconds=START_SECONDS):
    """Waits for a line of the log that begins with `words`; fails at the end of the log, or too late."""
    is_told = lambda: any(line.startswith(words) for line in self.log)
    with self._told:
      self._told.wait_for(lambda: is_told() or self._is_over, seconds)
      assert is_told(), "".join(self.log)

  def connect(self):
    """Makes the client; it is connected once this returns."""
    [self.address] = re.findall(r"listening on (\S+)", "".join(self.log))
    self.channel = grpc.insecure_channel(self.address)
    self.stub = JETSTREAM.services.OrchestratorStub(self.channel)
    grpc.channel_ready_future(self.channel).result(60)

  def start(self, prompt=None, limit=50, **fields):
    """Asks for the answer to a text or to ids, and returns the call."""
    if isinstance(prompt, str):
      fields["text_content"] = Request.TextContent(text=prompt)
    elif prompt is not None:
      fields["token_content"] = Request.TokenContent(token_ids=prompt)
    return self.stub.Decode(Request(max_tokens=limit, **fields), timeout=120)

  def finish(self, call):
    """Waits for the end of an answer."""
    ids, text = [], []
    try:
      for response in call:
        [sample] = response.stream_content.samples
        ids += sample.token_ids
        text.append(sample.text)
    except grpc.RpcError as failure:
      return Answer(ids, "".join(text), failure.code(), failure.details())
    return Answer(ids, "".join(text))

  def ask(self, prompt=None, limit=50, **fields):
    """Asks as `start` does, and waits for the end."""
    return self.finish(self.start(prompt, limit, **fields))

  def ask_all(self, *asked):
    """Asks everything at once, each with the arguments of `ask`."""
    answers = [None] * len(asked)

    def ask(number):
      answers[number] = self.ask(*asked[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(120)
    return answers

  def stop(self, number=signal.SIGTERM):
    """Stops it by a signal and returns its exit status."""
    self.process.send_signal(number)
    return self.wait()

  def wait(self):
    """Returns its exit status once it has ended; the log is whole then."""
    status = self.process.wait(30)
    self._reader.join(5)
    return status

  def close(self):
    """Ends it at once."""
    self.process.kill()
    self.process.wait()
    if self.channel is not None:
      self.channel.close()


@contextlib.contextmanager
def starting(program, *arguments, env=None):
  """Starts a server that may not be ready yet, and ends it whatever happens."""
  server = Server(program, *arguments, env=env)
  try:
    yield server
  finally:
    server.close()


@contextlib.contextmanager
def running(program, *arguments, env=None):
  """Runs a server, and ends it whatever happens."""
  with starting(program, *arguments, env=env) as server:
    server.wait_for("ready")
    server.connect()
    yield server
