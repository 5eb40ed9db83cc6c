"""Our server and mlx-lm's as processes, each on a free port, only one of them running at a time."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # so that `python -m MaxText.serve` is this tree's
START_SECONDS = 600.0  # our server compiles its programs on its first start
MODEL = "default_model"  # mlx-lm's name for the one that it was started with


class Server:
  """A server that is paused whenever it is not asked for.

  Attributes:
    name: of this side.
    port: on 127.0.0.1.
  """

  def __init__(self, name: str, command: list[str], port: int, health: str, log: Path, **defaults: str):
    """Starts the process and waits until `health` answers 200.

    Args:
      name: of this side.
      command: arguments of the process.
      port: that the command names.
      health: path that answers 200 once it is ready.
      log: file for what it prints.
      **defaults: environment variables of the process, where ours does not have them.
    """
    self.name, self.port, self._log = name, port, log
    with log.open("w") as out:
      environment = defaults | os.environ
      self._process = subprocess.Popen(
        command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment
      )
    self._wait(health)
    self.pause()

  def resume(self) -> None:
    """Lets the process run."""
    self._process.send_signal(signal.SIGCONT)

  def pause(self) -> None:
    """Stops the process where it is, so that it takes nothing from the other one."""
    self._process.send_signal(signal.SIGSTOP)

  def close(self) -> None:
    """Ends the process."""
    self.resume()
    self._process.terminate()
    try:
      self._process.wait(timeout=30)
    except subprocess.TimeoutExpired:
      self._process.kill()

  def _wait(self, health: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not self._is_ready(health):
      if self._process.poll() is not None or time.monotonic() > end:
        self._process.kill()
        tail = "\n".join(self._log.read_text().splitlines()[-10:])
        raise RuntimeError(f"{self.name} does not start; the end of {self._log}:\n{tail}")
      time.sleep(0.5)

  def _is_ready(self, health: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
    try:
      connection.request("GET", health)
      return connection.getresponse().status == 200
    except OSError:
      return False
    finally:
      connection.close()


def our_server(checkpoint: Path, slots: int, context: int, log: Path) -> Server:
  """Starts `python -m MaxText.serve` with room for `slots` requests of `context` tokens."""
  port = free_port()
  keys = {
    "port": port,
    "served_model_name": MODEL,
    "slots": slots,
    "max_target_length": context,
    "prefill_chunk": 128,
  }
  command = [sys.executable, "-m", "MaxText.serve", str(checkpoint)]
  return Server("ours", command + [f"{key}={value}" for key, value in keys.items()], port, "/ready", log)


def mlx_server(python: Path, checkpoint: Path, log: Path) -> Server:
  """Starts `mlx_lm.server` of the environment that `python` belongs to, as it comes."""
  port = free_port()
  command = [str(python.with_name("mlx_lm.server")), "--model", str(checkpoint), "--port", str(port)]
  command += ["--log-level", "WARNING"]
  # the path is a directory; nothing is looked up
  return Server("mlx_lm", command, port, "/health", log, HF_HUB_OFFLINE="1")


def free_port() -> int:
  """Returns a port that nobody listens on."""
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]
