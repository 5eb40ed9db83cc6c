"""mlx-lm as a process of its own, in a virtual environment that the benchmark makes."""

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

REQUIREMENTS = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2")
SCRIPT = Path(__file__).with_name("peer_mlx.py")


def peer_python(workdir: Path) -> Path:
  """Returns the interpreter of the peer's environment, installing it on the first call."""
  home = workdir / "peer-mlx"
  python, done = home / "bin" / "python", home / "complete"
  if not done.exists():
    print(f"installing {', '.join(REQUIREMENTS)} into {home}", file=sys.stderr)
    venv.create(home, with_pip=True, clear=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
    done.touch()
  return python


class Peer:
  """One loaded peer; requests go through a pipe, one JSON line each."""

  def __init__(self, workdir: Path, directory: Path):
    """Starts the peer on the checkpoint in `directory` and waits until it is loaded."""
    self._out = workdir / "peer-logits.npy"
    command = [str(peer_python(workdir)), str(SCRIPT), str(directory)]
    self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    self._answer()

  def logits(self, ids: Sequence[int]) -> np.ndarray:
    """Returns float32 logits [T, vocab] of one prompt."""
    self._ask(op="logits", ids=list(ids), out=str(self._out))
    return np.load(self._out)

  def prefill(self, ids: Sequence[int]) -> float:
    """Seconds from a fresh cache to the first next token of one prompt."""
    return self._ask(op="prefill", ids=list(ids))["seconds"]

  def decode(self, batch: int, prompt: Sequence[int], steps: int) -> tuple[float, list[int]]:
    """Seconds of `steps` greedy steps of `batch` equal rows, and the tokens of the first row."""
    answer = self._ask(op="decode", batch=batch, prompt=list(prompt), steps=steps)
    return answer["seconds"], answer["token_ids"]

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait(timeout=30)

  def _ask(self, **request) -> dict:
    self._process.stdin.write(json.dumps(request) + "\n")
    self._process.stdin.flush()
    return self._answer()

  def _answer(self) -> dict:
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f"the peer ended with status {self._process.wait()}")
    return json.loads(line)
