"""The pair of byte arrays that holds an MXFP4 weight.

Dims: N output channels, K input channels. Source: spec 3.1.
"""

import dataclasses

import jax
from jaxtyping import Array, UInt8

BLOCK = 32
"""Input channels that share one scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MxFp4:
  """A weight [..., N, K] kept in the published bytes.

  Attributes:
    packed: [..., N, half] two codes a byte (half = K/2); the low nibble is the even input channel.
    scale: [..., N, blocks] E8M0 exponents (blocks = K/32), bias 127; 255 means NaN.
  """

  packed: UInt8[Array, "*E N half"]
  scale: UInt8[Array, "*E N blocks"]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape [..., N, K] of the weight that the bytes stand for."""
    return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

  @property
  def ndim(self) -> int:
    """Rank of the weight."""
    return self.packed.ndim
