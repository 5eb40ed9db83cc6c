"""Shapes and inputs of Kimi Delta Attention, shared by tests and benchmarks.

Dims: B batch, T new tokens, H heads, K key width, V value width.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
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
  draw = np.random.default_rng(seed).standard_normal
  k = correlation * draw((B, 1, H, K)) + (1 - correlation) * draw((B, T, H, K))
  slope = np.exp(np.linspace(0, 0.7, H))[:, None]
  arrays = KdaInputs(
    q=_unit(draw((B, T, H, K))) * K**-0.5,
    k=_unit(k),
    v=draw((B, T, H, V)),
    log_decay=-5 * _sigmoid(slope * (draw((B, T, H, K)) + shift)),
    beta=_sigmoid(draw((B, T, H)) + 1),
    state=draw((B, H, K, V)),
  )
  return KdaInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))


def _unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))
