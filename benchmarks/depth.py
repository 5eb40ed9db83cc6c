"""Compile time and temporary memory of a scanned stack at two depths: neither may grow with depth."""

import time

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.configs.published import from_published
from MaxText.models import registry
from tests.reference.generator import k3_config_json

DEPTHS = (9, 45)
TOKENS = 64
GROWTH = 1.5  # allowed ratio of the deep figure to the shallow one; timings of a busy machine scatter


def lowered(layers: int) -> jax.stages.Lowered:
  """A prefill of `layers` scanned layers, not yet compiled.

  Both depths have whole cycles and one layer behind them, no dense layer in front, and three AttnRes blocks:
  what differs is the number of cycles alone.
  """
  full = (*range(4, layers, 4), layers)
  shape = dict(num_hidden_layers=layers, full_attn_layers=full, first_k_dense_replace=0)
  published = k3_config_json(**shape, attn_res_block_size=layers // 3)
  cfg = from_published(published).model_copy(update={"scan_layers": True})
  model = registry.abstract(cfg)
  graph, params = nnx.split(model)
  cache = model.init_cache(1, TOKENS)
  ids = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
  program = jax.jit(lambda p, i, c: nnx.merge(graph, p)(i, c), donate_argnums=2)
  return program.lower(params, ids, cache)


def compiled(layers: int) -> tuple[float, int]:
  """Compiles a prefill of `layers` scanned layers; returns seconds and temporary bytes."""
  program = lowered(layers)
  start = time.perf_counter()
  executable = program.compile()
  return time.perf_counter() - start, executable.memory_analysis().temp_size_in_bytes


def depth_figures() -> dict:
  """Compares both depths after a first compilation that warms the compiler up."""
  compiled(DEPTHS[0])
  (short_s, short_bytes), (long_s, long_bytes) = (compiled(layers) for layers in DEPTHS)
  return {
    "figure": "depth",
    "layers": DEPTHS,
    "compile_seconds": (round(short_s, 2), round(long_s, 2)),
    "temporary_bytes": (short_bytes, long_bytes),
    "passed": long_s <= GROWTH * short_s and long_bytes <= GROWTH * short_bytes,
  }
