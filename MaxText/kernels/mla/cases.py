"""Shapes and inputs of latent attention, shared by tests and benchmarks.

Dims: B batch, T new tokens, S cache slots, H heads, N nope width, P tail width, R latent rank, V value width.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

LENGTHS = (1, 2, 17, 40)
TINY = dict(H=3, N=6, P=4, R=12, V=5)
SPEED_SHAPES = {  # B, T, S and the widths
  "decode": (8, 1, 4096, dict(H=12, N=128, P=64, R=512, V=128)),
  "prefill": (1, 2048, 0, dict(H=4, N=128, P=64, R=512, V=128)),
}


class MlaInputs(NamedTuple):
  """Array arguments of `mla` in order.

  Attributes:
    q_nope: [B, T, H, N] query for the expanded keys.
    q_tail: [B, T, H, P] query for the tail.
    latent: [B, T, R+P] cache rows of the new tokens.
    w_uk: [H, N, R] latent -> key.
    w_uv: [H, V, R] latent -> value.
  """

  q_nope: Float32[Array, "B T H N"]
  q_tail: Float32[Array, "B T H P"]
  latent: Float32[Array, "B T R+P"]
  w_uk: Float32[Array, "H N R"]
  w_uv: Float32[Array, "H V R"]


def random_inputs(B: int, T: int, *, H: int, N: int, P: int, R: int, V: int, seed: int = 0) -> MlaInputs:
  """Draws inputs with scores of order 1 under a scale of (N + P)**-0.5."""
  draw = np.random.default_rng(seed).standard_normal
  arrays = MlaInputs(
    q_nope=draw((B, T, H, N)),
    q_tail=draw((B, T, H, P)),
    latent=draw((B, T, R + P)),
    w_uk=draw((H, N, R)) * R**-0.5,
    w_uv=draw((H, V, R)) * R**-0.5,
  )
  return MlaInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))
