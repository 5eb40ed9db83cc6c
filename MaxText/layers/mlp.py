"""The gated feed-forward block: dense layers and shared experts. Source: spec 2.7 step 5, 2.8."""

from flax import nnx
from jaxtyping import Array, Float

from MaxText.configs.schema import Config
from MaxText.layers.projection import Projection
from MaxText.layers.situ import gated_activation


class Mlp(nnx.Module):
  """down(activation(gate x, up x))."""

  def __init__(self, cfg: Config, width: int, *, rngs: nnx.Rngs):
    D = cfg.base_emb_dim
    self.gate_proj = Projection(cfg, D, width, ("mlp", "embed"), rngs=rngs)
    self.up_proj = Projection(cfg, D, width, ("mlp", "embed"), rngs=rngs)
    self.down_proj = Projection(cfg, width, D, ("embed", "mlp"), rngs=rngs)
    self.cfg = cfg

  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Maps x [B, T, D] to [B, T, D]."""
    return self.down_proj(gated_activation(self.cfg)(self.gate_proj(x), self.up_proj(x)))
