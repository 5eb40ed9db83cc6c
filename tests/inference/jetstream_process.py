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
import asyncio, sys
sys.path.insert(0, {root!r})
import grpc
from MaxText.configs.loader import load_command
from MaxText.configs.options import JetStreamOptions
from MaxText.inference import jetstream_server, jetstream_shim
from MaxText.inference.loading import Loaded
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference.echo_engine import STOP, EchoEngine
from tests.locations import TINY

async def serve():
  server = grpc.aio.server()
  print("listening on 127.0.0.1:%d" % server.add_insecure_port("127.0.0.1:0"), file=sys.stderr, flush=True)
  loaded = Loaded(EchoEngine(max_target_length=64), KimiTokenizer.from_directory(TINY), (STOP,))
  options = load_command("kimi-k3-tiny", sys.argv[1:], JetStreamOptions)[1]
  loaded.engine.seconds = 0.002
  await jetstream_server.run(jetstream_shim.load(), server, loaded, options)

asyncio.run(serve())
"""
COMMAND = "import sys; from MaxText.inference import jetstream_server as s; sys.exit(s.main(sys.argv[1:]))"


class Answer(NamedTuple):
  """What a client has in the end: ids, text, and the error that came instead of the rest."""

  ids: list
  text: str
  code: grpc.StatusCode | None = None
  details: str = ""


class Server:
  """A process that serves, and a client of it.

  Attributes:
    process: which may be gone.
    log: lines of its stderr.
    address: where it listens.
  """

  def __init__(self, program, *arguments, env=None):
    command = [sys.executable, "-c", program, *arguments]
    self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env)
    self.log = []
    for line in self.process.stderr:
      self.log.append(line)
      if line.startswith("ready"):
        break
    [self.address] = re.findall(r"listening on (\S+)", "".join(self.log)) or [None]
    assert self.log and self.log[-1].startswith("ready"), "".join(self.log)
    self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
    self._reader.start()
    self.channel = grpc.insecure_channel(self.address)
    self.stub = JETSTREAM.services.OrchestratorStub(self.channel)

  def ask(self, prompt=None, limit=50, **fields):
    """Asks for the answer to a text or to ids, and waits for its end."""
    if isinstance(prompt, str):
      fields["text_content"] = Request.TextContent(text=prompt)
    elif prompt is not None:
      fields["token_content"] = Request.TokenContent(token_ids=prompt)
    ids, text = [], []
    try:
      for response in self.stub.Decode(Request(max_tokens=limit, **fields), timeout=120):
        [sample] = response.stream_content.samples
        ids += sample.token_ids
        text.append(sample.text)
    except grpc.RpcError as failure:
      return Answer(ids, "".join(text), failure.code(), failure.details())
    return Answer(ids, "".join(text))

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

  def stop(self):
    """Stops it by SIGTERM and returns its exit status."""
    self.process.send_signal(signal.SIGTERM)
    status = self.process.wait(30)
    self._reader.join(5)
    return status


@contextlib.contextmanager
def running(program, *arguments, env=None):
  """Runs a server, and ends it whatever happens."""
  server = Server(program, *arguments, env=env)
  try:
    yield server
  finally:
    server.process.kill()
    server.process.wait()
    server.channel.close()
