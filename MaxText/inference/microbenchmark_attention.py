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
  """Times both kinds by turns.

  Args:
    cfg: the model.
    batch: B, rows side by side.
    contexts: tokens that each row holds before the step.
    page_size: J, tokens of a page.
    rounds: timings of each kind at each context.
    warm_up: rounds before them that do not count.

  Returns:
    of each kind that the model has, "kda" and "mla": context -> milliseconds of a step of one layer, and the
    bytes that it reads and writes of its memory; and the seconds that compiling took.
  """
  kinds = {kind: _Layer(kind, cfg, batch, max(contexts), page_size) for kind in _kinds(cfg)}
  times = {(kind, context): [] for kind in kinds for context in contexts}
  for number in range(warm_up + rounds):
    for kind, context in times:
      seconds = kinds[kind].seconds(context)
      times[kind, context] += [seconds] * (number >= warm_up)

  def report(kind, context):
    samples = times[kind, context]
    timed = {"step_in_ms": 1e3 * float(np.median(samples))} | distribution(samples)
    return timed | {"memory_bytes": batch * _memory_bytes(cfg, kind, context)}

  reports = {kind: {context: report(kind, context) for context in contexts} for kind in kinds}
  return reports | {"compile_seconds": sum(layer.compile_seconds for layer in kinds.values())}


def _kinds(cfg: Config) -> list[str]:
  return sorted({cfg.layer_kind(layer) for layer in range(cfg.base_num_decoder_layers)})


def _memory_bytes(cfg: Config, kind: str, context: int) -> int:
  """Of one row in one layer."""
  full = len(cfg.full_attn_layers)
  if kind == "mla":
    return (context + 1) * costs.latent_bytes(cfg) // full
  return 2 * costs.state_bytes(cfg) // (cfg.base_num_decoder_layers - full)


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
