"""Bytes to numbers and back for MXFP4, in integer arithmetic on float bits; on the host, by table.

A code is a sign, two exponent bits and one mantissa bit: a float32 cut to four bits. So a value is assembled
by adding exponents, which is exact for every scale byte (a CPU multiplication would flush subnormal results)
and vectorises, where a table lookup does not.

Dims: N output channels, K input channels. Source: spec 3.1.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from MaxText.kernels.mxfp4 import reference
from MaxText.kernels.mxfp4.container import BLOCK, MxFp4

_EXPONENT = 23  # float32: mantissa bits below the exponent
_CODE = 22  # position at which the code's three magnitude bits line up with exponent and first mantissa bit
_INFINITY = np.uint32(0x7F800000)


def unpack(w: MxFp4, dtype: DTypeLike) -> Float[Array, "*E N K"]:
  """Returns the weight that the bytes stand for, exact in bfloat16 and float32.

  Args:
    w: packed [..., N, K/2] and scale [..., N, K/32]; numpy arrays give a numpy result.
    dtype: floating dtype of the result.

  Returns:
    [..., N, K] code * 2^(scale - 127); NaN throughout a block of scale 255.
  """
  if isinstance(w.packed, np.ndarray):
    return reference.unpack(w).astype(dtype, copy=False)
  bits = jnp.stack([_bits(w, shift) for shift in (0, 4)], axis=-1).reshape(w.shape)
  if dtype == jnp.bfloat16:  # the low half is zero; a conversion could flush subnormals
    return (bits >> 16).astype(np.uint16).view(jnp.bfloat16)
  return bits.view(np.float32).astype(dtype)


def unpack_halves(w: MxFp4) -> tuple[Float[Array, "*E N half"], Float[Array, "*E N half"]]:
  """Returns the even and the odd input channels apart, each [..., N, K/2] float32.

  On a CPU this takes a quarter of the time of `unpack`, whose interleaved store does not vectorise.
  """
  return _bits(w, 0).view(np.float32), _bits(w, 4).view(np.float32)


def _bits(w, shift):
  """float32 bits [..., N, K/2] of the codes in the nibble at `shift`."""
  codes = (w.packed.reshape(*w.scale.shape, BLOCK // 2) >> shift).astype(np.uint32)
  scale = w.scale[..., None].astype(np.uint32)
  bits = _magnitude_bits(codes & 7, scale) | ((codes & 8) << 28)
  return jnp.where(scale == 255, np.uint32(0x7FC00000), bits).reshape(w.packed.shape)


def _magnitude_bits(magnitude, scale):
  """float32 bits of {0, .5, 1, 1.5, 2, 3, 4, 6}[magnitude] * 2^(scale - 127)."""
  normal = (jnp.where(magnitude < 2, 0, magnitude) + 2 * (scale - 1)) << _CODE
  normal = jnp.minimum(normal, _INFINITY)  # scales 253 and 254 reach past the largest float32
  # below scale 2 the halves are subnormal: their bits are linear in the code
  lowest = jnp.where(magnitude < 4, magnitude << (_CODE - 1), (magnitude - 2) << _CODE)
  small = jnp.where(scale == 0, lowest, magnitude << _CODE)
  return jnp.where(magnitude == 0, np.uint32(0), jnp.where(scale < 2, small, normal))


def pack(w: Float[Array, "*E N K"]) -> MxFp4:
  """Rounds a weight to MXFP4 by the rule of compressed-tensors.

  The scale of a block is 2^(e - 2), where its largest magnitude is at least 1.75 * 2^(e - 1) and below
  1.75 * 2^e, so that the largest quotient is at least 3.5 and below 7. Quotients round to the nearest code,
  ties to the code whose mantissa bit is 0, and anything above 5 becomes 6. A weight that came from `unpack`
  comes back equal, though not always in the same bytes, since two scales may hold a block.

  Args:
    w: [..., N, K] with K a multiple of 32; numpy arrays give numpy bytes. A block with a non-finite value
      gets scale 255.

  Returns:
    packed [..., N, K/2] and scale [..., N, K/32].

  Raises:
    ValueError: K is not a multiple of 32.
  """
  if w.shape[-1] % BLOCK:
    raise ValueError(f"pack: the input axis of {w.shape} is not a multiple of {BLOCK}")
  xp = np if isinstance(w, np.ndarray) else jnp
  blocks = w.astype(np.float32).reshape(*w.shape[:-1], -1, BLOCK)
  scale = _block_scale(xp, xp.abs(blocks).max(axis=-1))
  inverse = ((np.uint32(254) - xp.minimum(scale, 253)) << _EXPONENT).view(np.float32)
  codes = _nearest_code(xp, blocks * inverse[..., None])
  codes = codes.reshape(*w.shape[:-1], -1, 2)
  return MxFp4(packed=codes[..., 0] | (codes[..., 1] << 4), scale=scale.astype(np.uint8))


def _block_scale(xp, largest):
  """E8M0 byte of a block, as uint32: exponent of the rounded largest magnitude, less that of 4."""
  exponent = (largest.view(np.uint32) + (1 << (_EXPONENT - 2))) >> _EXPONENT
  return xp.where(xp.isfinite(largest), xp.maximum(exponent, 2) - 2, 255).astype(np.uint32)


def _nearest_code(xp, quotient):
  """uint8 code of each quotient; ties go to the code whose mantissa bit is 0."""
  size = xp.abs(quotient)
  code = sum((size > edge).astype(np.uint8) for edge in (0.25, 1.25, 2.5, 5.0))
  code = code + sum((size >= edge).astype(np.uint8) for edge in (0.75, 1.75, 3.5))
  return code | (xp.signbit(quotient).astype(np.uint8) << 3)
