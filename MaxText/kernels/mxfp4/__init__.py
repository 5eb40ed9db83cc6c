"""MXFP4 weights: 4-bit codes that share one power-of-two scale per 32 input channels.

Source: spec 2.0 (dtypes) and 3.1 (layout). The bytes are those of the published checkpoint.
"""

from MaxText.kernels.mxfp4.codec import pack, unpack, unpack_halves
from MaxText.kernels.mxfp4.container import BLOCK, MxFp4

__all__ = ["BLOCK", "MxFp4", "pack", "unpack", "unpack_halves"]
