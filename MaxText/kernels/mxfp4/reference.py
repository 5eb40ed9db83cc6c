"""Definition of the MXFP4 values, on the host: a table of byte pairs times a power of two.

Dims: N output channels, K input channels. Source: spec 3.1.
"""

import numpy as np
from jaxtyping import Float32

from MaxText.kernels.mxfp4.container import BLOCK, MxFp4

_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_CODES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BYTES = np.arange(256)
# one 8-byte entry per byte, so that a look-up yields both of its elements
_PAIRS = np.stack([_CODES[_BYTES & 15], _CODES[_BYTES >> 4]], axis=-1).view(np.uint64)[:, 0]
_SCALES = np.where(_BYTES == 255, np.nan, np.exp2(_BYTES - 127.0)).astype(np.float32)


def unpack(w: MxFp4) -> Float32[np.ndarray, "*E N K"]:
  """Returns [..., N, K] float32 from packed [..., N, K/2] and scale [..., N, K/32] in host memory."""
  pairs = _PAIRS[w.packed].view(np.float32).reshape(*w.scale.shape, BLOCK)
  with np.errstate(over="ignore"):  # scales 253 and 254 reach past the largest float32
    return (pairs * _SCALES[w.scale][..., None]).reshape(w.shape)
