"""mlx-lm behind a pipe: one JSON request a line in, one JSON line out. Runs in an environment of its own.

Requests: {"op": "logits", "ids": [...], "out": path}, {"op": "prefill", "ids": [...]},
{"op": "decode", "batch": B, "prompt": [...], "steps": N}. Times are seconds of the work alone.
"""

import json
import sys
import time

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model


def logits(model, ids: list[int], out: str) -> dict:
  """Writes float32 logits [T, vocab] of one prompt to `out`."""
  values = model(mx.array([ids]))[0].astype(mx.float32)
  np.save(out, np.array(values))
  return {}


def prefill(model, ids: list[int]) -> dict:
  """Times one forward pass of a whole prompt into a fresh cache, up to the first next token."""
  cache = model.make_cache()
  start = time.perf_counter()
  mx.eval(mx.argmax(model(mx.array([ids]), cache=cache)[:, -1], axis=-1))
  return {"seconds": time.perf_counter() - start}


def decode(model, batch: int, prompt: list[int], steps: int) -> dict:
  """Times `steps` greedy steps of `batch` equal rows, dispatched one step ahead as mlx-lm's own loop does."""
  cache = model.make_cache()
  token = mx.argmax(model(mx.array([prompt] * batch), cache=cache)[:, -1], axis=-1)
  mx.eval(token)
  picked = []
  start = time.perf_counter()
  for _ in range(steps):
    token = mx.argmax(model(token[:, None], cache=cache)[:, -1], axis=-1)
    mx.async_eval(token)
    picked.append(token)
  mx.eval(picked)
  return {"seconds": time.perf_counter() - start, "token_ids": [int(t[0]) for t in picked]}


def main() -> None:
  """Loads the checkpoint named on the command line and serves requests until the pipe closes."""
  from pathlib import Path

  model, _ = load_model(Path(sys.argv[1]))
  operations = {"logits": logits, "prefill": prefill, "decode": decode}
  print(json.dumps({"ready": True}), flush=True)
  for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps(operations[request.pop("op")](model, **request)), flush=True)


if __name__ == "__main__":
  main()
