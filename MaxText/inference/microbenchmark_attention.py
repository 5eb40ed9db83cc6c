"""Times one layer of each kind of attention as a decode step runs it, at several contexts.

A whole step hides in its sum that linear attention costs the same at any context; two layers alone show it.
Weights and memory are random: neither kind's time depends on them.

Dims: B rows, D model width, N pages of a row, J tokens of a page.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from MaxText.configs import costs
from MaxText.configs.schema import Config
from MaxText.inference.measurement import clocked, distribution
from MaxText.inference.program import Programs
from MaxText.layers.attention_kda import KimiDeltaAttention
from MaxText.layers.attention_mla import GatedLatentAttention
from MaxText.layers.cache import KdaCache, MlaPages

Memory = KdaCache | MlaPages


def step(layer: nnx.Module, cache: Memory, x: Float[Array, "B 1 D"]) -> tuple[Memory, Float[Array, "B 1 D"]]:
  """Runs one token of every row, x [B, 1, D], through one attention layer, whose memory is donated."""
  y, cache = layer(x, cache)
  return cache, y


def attention_steps(
  cfg: Config, batch: int, contexts: Sequence[int], page_size: int, rounds: int, warm_up: int
) -> dict[str, Any]:
  """Times each kind, its contexts by turns; only one kind is in memory at a time.

  Args:
    cfg: the model.
    batch: B, rows side by side.
    contexts: tokens that each row holds before the step.
    page_size: J, tokens of a page.
    rounds: timings of a kind at each context.
    warm_up: rounds before them that do not count.

  Returns:
    of each kind that the model has, "kda" and "mla": context -> milliseconds of a step of one layer, and the
    bytes that it reads and writes of its memory; and the seconds that compiling took.
  """
  reports: dict[str, Any] = {}
  compile_seconds = 0.0
  for kind in costs.attention_kinds(cfg):
    times, seconds = _kind_times(kind, cfg, batch, contexts, page_size, rounds, warm_up)
    compile_seconds += seconds
    reports[kind] = {
      context: {"step_in_ms": 1e3 * float(np.median(samples))}
      | distribution(samples)
      | {"memory_bytes": batch * _memory_bytes(cfg, kind, context)}
      for context, samples in times.items()
    }
  return reports | {"compile_seconds": compile_seconds}


def _kind_times(
  kind: str, cfg: Config, batch: int, contexts: Sequence[int], page_size: int, rounds: int, warm_up: int
) -> tuple[dict[int, list[float]], float]:
  """Context -> seconds of the steps of one kind, and the seconds of compiling; nothing of it stays."""
  layer = _Layer(kind, cfg, batch, max(contexts), page_size)
  times: dict[int, list[float]] = {context: [] for context in contexts}
  for number in range(warm_up + rounds):
    for context, samples in times.items():
      seconds = layer.seconds(context)
      samples += [seconds] * (number >= warm_up)
  return times, layer.compile_seconds


def _memory_bytes(cfg: Config, kind: str, context: int) -> int:
  """That one row in one layer reads and writes in a step."""
  rows = context + 1 if kind == "mla" else 2
  return rows * costs.layer_memory_bytes(cfg, kind)


class _Layer:
  """One layer with random weights, the memory of its rows, and the compiled step."""

  def __init__(self, kind: str, cfg: Config, batch: int, context: int, page_size: int):
    build = KimiDeltaAttention if kind == "kda" else GatedLatentAttention
    self._programs = Programs(build(cfg, rngs=nnx.Rngs(0)))
    self._step = self._programs.program(step, donates=True)
    draw = partial(_normal, np.random.default_rng(0))
    self._x = draw((batch, 1, cfg.base_emb_dim), cfg.dtype)
    if kind == "kda":
      H, K = cfg.kda_num_heads, cfg.kda_head_dim
      window = draw((batch, cfg.short_conv_kernel_size - 1, 3, H * K), cfg.dtype)
      self._memory: Memory = KdaCache(window, draw((batch, H, K, K), "float32"))
    else:
      N = -(-(context + 1) // page_size)
      pool = draw((1, batch * N, page_size, cfg.latent_width), cfg.dtype)
      table = jnp.arange(batch * N, dtype=jnp.int32).reshape(1, batch, N)
      self._memory = MlaPages(pool, table, jnp.zeros(batch, jnp.int32))

  @property
  def compile_seconds(self) -> float:
    return self._programs.compile_seconds

  def seconds(self, context: int) -> float:
    """Time of one step at a context, which only pages know of."""
    if isinstance(self._memory, MlaPages):
      length = jnp.full_like(self._memory.length, context)
      self._memory = dataclasses.replace(self._memory, length=length)
    self._programs.compile(self._step.job(self._programs.params, self._memory, self._x))
    return clocked(lambda: jax.block_until_ready(self._memory), self._run)[0]

  def _run(self) -> None:
    self._memory, _ = self._programs.run(self._step, self._memory, self._x)


def _normal(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
  return jnp.asarray(random.standard_normal(shape, np.float32), dtype)
