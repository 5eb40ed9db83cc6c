"""Shapes of the grouped products that tests and benchmarks share.

Dims: M rows, E experts, L expert input width, F expert width.
"""

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32


@dataclasses.dataclass(frozen=True)
class Case:
  """One routing problem.

  Attributes:
    name: what the shape stands for.
    tokens: tokens of the call.
    top_k: experts a token.
    experts: E.
    latent: L.
    width: F.
  """

  name: str
  tokens: int
  top_k: int
  experts: int
  latent: int
  width: int

  @property
  def rows(self) -> int:
    """M, one row for each expert of each token."""
    return self.tokens * self.top_k

  def group_sizes(self, rng: np.random.Generator) -> Int32[np.ndarray, " E"]:
    """Rows [E] of each expert when every token picks distinct experts evenly at random."""
    picks = [rng.choice(self.experts, self.top_k, replace=False) for _ in range(self.tokens)]
    return np.bincount(np.concatenate(picks), minlength=self.experts).astype(np.int32)

  def rows_in(self, rng: np.random.Generator) -> Float32[np.ndarray, "M L"]:
    """Normal rows [M, L]."""
    return rng.standard_normal((self.rows, self.latent), dtype=np.float32)

  def weights(
    self, rng: np.random.Generator, stack: int | None = None
  ) -> tuple[Float32[np.ndarray, "*S E N K"], ...]:
    """Gate and up [E, F, L] and down [E, L, F], scaled by fan-in; a leading axis with `stack`."""
    lead = (self.experts,) if stack is None else (stack, self.experts)
    into, out = (*lead, self.width, self.latent), (*lead, self.latent, self.width)
    return tuple(
      rng.standard_normal(s, dtype=np.float32) * np.float32(s[-1] ** -0.5) for s in (into, into, out)
    )


TESTED = tuple(
  Case(f"rows_{tokens * top_k}", tokens, top_k, experts=8, latent=64, width=32)
  for tokens, top_k in ((1, 1), (1, 2), (2, 4), (16, 4), (75, 4))
)
"""Small; on a CPU the last one takes tiles of 32 rows, the others single rows."""

TIMED = (
  Case("decode_1", tokens=1, top_k=8, experts=64, latent=256, width=256),
  Case("decode_8", tokens=8, top_k=8, experts=64, latent=256, width=256),
  Case("prefill_512", tokens=512, top_k=8, experts=64, latent=256, width=256),
  Case("many_experts", tokens=16, top_k=16, experts=896, latent=128, width=128),
)
"""The benchmark checkpoint in decode at batch 1 and 8 and in prefill, and K3's expert count with few rows."""
