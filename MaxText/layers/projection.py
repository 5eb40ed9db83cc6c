"""The one matrix product of the model: no bias anywhere in the text tower (spec 2.0)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from MaxText.common import params
from MaxText.configs.schema import Config

PROJECTED = "projected"


class Projection(nnx.Module):
  """y = x W^T with W stored as published, [out, in]; plus what an adapter `lora` adds, if one hangs here."""

  def __init__(
    self, cfg: Config, width_in: int, width_out: int, axes: tuple[str | None, str | None], *, rngs: nnx.Rngs
  ):
    """Draws W [width_out, width_in]; `axes` are the logical names of (out, in)."""
    self.weight = params.param(
      rngs, (width_out, width_in), axes, cfg.parameter_dtype, params.normal(cfg.initializer_range)
    )

  def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B O"]:
    """Projects x [..., D] to [..., O] in x.dtype."""
    y = project(x, self.weight[...])
    return y + self.lora(x) if hasattr(self, "lora") else y


def project(x: Float[Array, "*B D"], weight: Float[Array, "O D"]) -> Float[Array, "*B O"]:
  """Contracts x [..., D] with weight [O, D]; float32 operands keep full precision on every platform."""
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  y = jnp.einsum("...d,od->...o", x, weight.astype(x.dtype), precision=precision)
  return checkpoint_name(y, PROJECTED)  # what the rematerialisation policy "minimal" keeps
