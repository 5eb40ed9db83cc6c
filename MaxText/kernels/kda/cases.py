"""Shapes and inputs of Kimi Delta Attention, shared by tests and benchmarks.

Dims: B batch, T new tokens, H heads, K key width, V value width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 129, 200)
SPEED_SHAPES = {  # B, T, H, K, V
  "decode": (8, 1, 24, 128, 128),
  "few-heads": (1, 1024, 4, 128, 128),
  "many-heads": (1, 256, 24, 128, 128),
}


class KdaInputs(NamedTuple):
  """Arguments of `kda` in order.

  Attributes:
    q: [B, T, H, K] normalised, scaled query.
    k: [B, T, H, K] normalised key.
    v: [B, T, H, V] value.
    log_decay: [B, T, H, K] natural log, <= 0.
    beta: [B, T, H] write strength.
    state: [B, H, K, V] memory before the first token.
  """

  q: Float32[Array, "B T H K"]
  k: Float32[Array, "B T H K"]
  v: Float32[Array, "B T H V"]
  log_decay: Float32[Array, "B T H K"]
  beta: Float32[Array, "B T H"]
  state: Float32[Array, "B H K V"]


def random_inputs(
  shape: tuple[int, int, int, int, int], *, seed: int = 0, shift: float = 0.0, correlation: float = 0.5
) -> KdaInputs:
  """Draws inputs as a layer would make them.

  Args:
    shape: B, T, H, K, V.
    seed: of the generator.
    shift: added to the gate projection: -3 gives slow decays (about -5e-3), 3 fast ones (about -5).
    correlation: share of one common direction in all keys of a head, in [0, 1).
  """
  B, T, H, K, V = shape
  keys = jax.random.split(jax.random.key(seed), 7)
  common = jax.random.normal(keys[0], (B, 1, H, K))
  k = correlation * common + (1 - correlation) * jax.random.normal(keys[1], (B, T, H, K))
  slope = jnp.exp(jnp.linspace(0, 0.7, H))[:, None]
  return KdaInputs(
    q=_unit(jax.random.normal(keys[2], (B, T, H, K))) * K**-0.5,
    k=_unit(k),
    v=jax.random.normal(keys[3], (B, T, H, V)),
    log_decay=-5 * jax.nn.sigmoid(slope * (jax.random.normal(keys[4], (B, T, H, K)) + shift)),
    beta=jax.nn.sigmoid(jax.random.normal(keys[5], (B, T, H)) + 1),
    state=jax.random.normal(keys[6], (B, H, K, V)),
  )


def _unit(x):
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
