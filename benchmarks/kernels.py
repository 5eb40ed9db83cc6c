"""Each kernel's implementations on the shapes that tests and benchmarks share: gate first, then time.

  python -m benchmarks.kernels [kda|mla|short_conv|grouped_mlp ...]

An implementation that disagrees with the reference is reported and not timed.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.kernels import grouped_matmul as grouped
from MaxText.kernels import kda as kda_op
from MaxText.kernels import mla as mla_op
from MaxText.kernels import short_conv as conv_op
from MaxText.kernels.grouped_matmul import cases as grouped_cases
from MaxText.kernels.kda import cases as kda_cases
from MaxText.kernels.mla import cases as mla_cases
from MaxText.kernels.short_conv import cases as conv_cases
from MaxText.layers.situ import situ

REPEATS = 5
TOLERANCE = 1e-4  # of the largest value; the suite holds the tight bounds
Variant = tuple[str, str, Callable, tuple]


def kda() -> Iterator[Variant]:
  """Token scan against chunks, and the single step at T = 1."""
  for name, shape in kda_cases.SPEED_SHAPES.items():
    for impl in ("reference", "step" if shape[1] == 1 else "chunked"):
      yield name, impl, functools.partial(kda_op.kda, impl=impl), (*kda_cases.random_inputs(shape), None)


def mla() -> Iterator[Variant]:
  """Materialised attention against the form that `auto` takes."""
  for name, (B, T, S, widths) in mla_cases.SPEED_SHAPES.items():
    inputs = mla_cases.random_inputs(B, T, **widths)
    latents = mla_cases.random_inputs(B, S, **widths).latent if S else None
    prefix = None if latents is None else (latents, jnp.full(B, S, jnp.int32))
    scale = (widths["N"] + widths["P"]) ** -0.5
    for impl in ("reference", "absorbed" if T == 1 else "direct"):
      run = functools.partial(mla_op.mla, segment_ids=None, scale=scale, impl=impl)
      yield name, impl, lambda *a, run=run: run(*a[:-1], prefix=a[-1]), (*inputs, prefix)


def short_conv() -> Iterator[Variant]:
  """The direct sum against shifts."""
  for name, (B, T, channels) in conv_cases.SPEED_SHAPES.items():
    draw = np.random.default_rng(0).standard_normal
    arrays = (
      draw((B, T, *channels)),
      draw((*channels, conv_cases.WIDTH)),
      draw((B, conv_cases.WIDTH - 1, *channels)),
    )
    for impl in ("reference", "shifted"):
      inputs = tuple(jnp.asarray(a, jnp.float32) for a in arrays)
      yield name, impl, functools.partial(conv_op.short_conv, segment_ids=None, impl=impl), inputs


def grouped_mlp() -> Iterator[Variant]:
  """Every row times every expert against blocks of rows."""
  activation = functools.partial(situ, beta=4.0, linear_beta=25.0)
  for case in grouped_cases.TIMED:
    rng = np.random.default_rng(0)
    arrays = (case.rows_in(rng), *case.weights(rng), case.group_sizes(rng))
    for impl in ("reference", "blocked"):
      run = functools.partial(grouped.grouped_mlp, activation=activation, impl=impl)
      yield case.name, impl, run, tuple(jnp.asarray(a) for a in arrays)


OPERATIONS = {f.__name__: f for f in (kda, mla, short_conv, grouped_mlp)}


def main(argv: list[str] | None = None) -> int:
  """Prints one JSON line a shape and implementation; returns 1 when one disagrees with the reference."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("operations", nargs="*", help=f"from {', '.join(OPERATIONS)}; all when none is named")
  options = parser.parse_args(argv)
  if unknown := set(options.operations) - set(OPERATIONS):
    parser.error(f"unknown operation {sorted(unknown)[0]!r}, known: {', '.join(OPERATIONS)}")
  passed = True
  for operation in options.operations or OPERATIONS:
    want = {}
    for name, impl, run, inputs in OPERATIONS[operation]():
      program = jax.jit(run).lower(*inputs).compile()
      got = jax.tree.leaves(program(*inputs))
      error = relative_error(got, want.setdefault(name, got))
      line = {"operation": operation, "shape": name, "impl": impl, "error": error}
      passed &= error <= TOLERANCE
      print(
        json.dumps(line | (milliseconds(program, inputs) if error <= TOLERANCE else {"wrong": True})),
        flush=True,
      )
  return 0 if passed else 1


def relative_error(got: list[jax.Array], want: list[jax.Array]) -> float:
  """Largest difference of any output, relative to that output's largest value."""
  return max(float(jnp.abs(g - w).max() / (jnp.abs(w).max() + 1e-30)) for g, w in zip(got, want))


def milliseconds(program: Callable, inputs: tuple) -> dict[str, float]:
  """Median, lowest and highest milliseconds over the repeats."""
  times = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    jax.block_until_ready(program(*inputs))
    times.append(1e3 * (time.perf_counter() - start))
  return {
    "median_ms": round(statistics.median(times), 3),
    "min_ms": round(min(times), 3),
    "max_ms": round(max(times), 3),
  }


if __name__ == "__main__":
  sys.exit(main())
