"""Types of the operands that every implementation of the grouped products takes.

Dims: E experts, N output and K input channels of one weight, F expert width.
"""

from collections.abc import Callable

from jaxtyping import Array, Float

from MaxText.kernels.mxfp4 import MxFp4

Weight = Float[Array, "*stack E N K"] | MxFp4
"""[E, N, K], or [S, E, N, K] that a layer number indexes; an array or MXFP4 bytes."""

Activation = Callable[[Float[Array, "rows F"], Float[Array, "rows F"]], Float[Array, "rows F"]]
"""(gate, up) -> hidden, elementwise on float32."""
