"""Gradient memory and speed of training the tiny model with each form of its linear attention, in one run.

  python -m benchmarks.training [--tokens 1024]

The token scan keeps a state a token for the backward pass, the chunked form one a chunk; of the kernel alone
tests/kernels/test_kda.py bounds that by a fifth. Here both compute the gradient of the whole bundled model on
one row of text, activations of every other layer included; they are compared first, then timed by turns. Only
ratios within a run mean anything.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import MaxText
from benchmarks.timing import Rate, ratio
from MaxText.checkpoints.load import load_params
from MaxText.configs import loader
from MaxText.tokenizers.registry import load_tokenizer
from MaxText.tokenizers.training import standard_library

TINY = Path(MaxText.__file__).parent / "assets" / "kimi-k3-tiny"
FORMS = ("reference", "chunked")
REPEATS = 5
TOLERANCE = 1e-4  # of the largest gradient of a parameter


def gradient(form: str, ids: jax.Array) -> tuple[Callable, nnx.State]:
  """Compiles the gradient of the mean next-token loss of `ids` [B, T + 1]; returns it and its argument."""
  cfg = loader.load(TINY, [f"kda_impl={form}", "expert_weights=dequantized", "scan_layers=true"])
  graph, weights = nnx.split(load_params(TINY, cfg, progress=False))

  def loss(weights):
    logits, _ = nnx.merge(graph, weights)(ids[:, :-1])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)
    return -jnp.mean(picked)

  return jax.jit(jax.grad(loss)).lower(weights).compile(), weights


def difference(one: nnx.State, other: nnx.State) -> float:
  """Largest difference of any parameter's gradients, relative to the largest of that parameter."""
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other))
  return max(float(jnp.abs(a - b).max() / (jnp.abs(a).max() + 1e-30)) for a, b in pairs)


def figures(tokens: int) -> dict:
  """Compares both forms on one row of `tokens` tokens."""
  tokenizer = load_tokenizer(TINY, loader.load(TINY).vocab_size)
  ids = jnp.asarray([tokenizer.encode("".join(standard_library()[1][:20]))[: tokens + 1]], jnp.int32)
  programs = {form: gradient(form, ids) for form in FORMS}
  error = difference(*(program(weights) for program, weights in programs.values()))
  seconds: dict[str, list[float]] = {form: [] for form in FORMS}
  for _ in range(REPEATS):
    for form, (program, weights) in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(weights))
      seconds[form].append(time.perf_counter() - start)
  rates = {form: Rate(tokens, tuple(times)) for form, times in seconds.items()}
  memory = {form: program.memory_analysis().temp_size_in_bytes for form, (program, _) in programs.items()}
  return {
    "figure": "training",
    "tokens": tokens,
    "gradient_error": float(np.format_float_scientific(error, 2)),
    "temporary_bytes": memory,
    "tokens_per_second": {form: rate.report() for form, rate in rates.items()},
    "times_as_fast": round(ratio(rates["chunked"], rates["reference"]), 2),
    "passed": error <= TOLERANCE,
  }


def main(argv: list[str] | None = None) -> int:
  """Prints one JSON line; returns 1 where the forms disagree."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tokens", type=int, default=1024, help="tokens of the row")
  report = figures(parser.parse_args(argv).tokens)
  print(json.dumps(report))
  return 0 if report["passed"] else 1


if __name__ == "__main__":
  raise SystemExit(main())
