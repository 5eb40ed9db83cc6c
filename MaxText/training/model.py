"""Our decoder behind the call that maxtext's loss makes, with the axis names that its sharding reads."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.models import registry

_BIAS = "e_score_correction_bias"


class RouterBias(nnx.Variable):
  """A router's selection bias. No parameter: no gradient, no optimizer and no weight decay touches it."""


class TrainedDecoder(nnx.Module):
  """What maxtext trains: a KimiDecoder, called without a cache.

  Attributes:
    decoder: the model that decodes, unchanged but for the kind of its router biases.
    mesh: devices, read by maxtext's loss.
  """

  def __init__(self, cfg: Config, mesh: jax.sharding.Mesh, *, rngs: nnx.Rngs):
    self.mesh = mesh
    self.decoder = registry.build(cfg, rngs)
    for _, module in nnx.iter_graph(self.decoder):
      if isinstance(module, nnx.Module) and hasattr(module, _BIAS):
        bias = getattr(module, _BIAS)
        setattr(module, _BIAS, RouterBias(bias.get_value(), axes=bias.get_metadata("axes")))
    for _, variable in nnx.iter_graph(self.decoder):
      if isinstance(variable, nnx.Param | params.Frozen | RouterBias):
        variable.set_metadata(out_sharding=variable.get_metadata("axes"))

  def __call__(
    self,
    decoder_input_tokens: Int[Array, "B T"],
    decoder_positions: Int[Array, "B T"] | None = None,
    decoder_segment_ids: Int[Array, "B T"] | None = None,
    **unused: Any,
  ) -> Float[Array, "B T vocab"]:
    """Returns next-token logits [B, T, vocab] float32.

    Args:
      decoder_input_tokens: [B, T] token ids.
      decoder_positions: [B, T], unread: the model has no positions.
      decoder_segment_ids: [B, T] document of each token, 0 = padding.
      **unused: what maxtext's loss passes to other models: targets, images, dropout.
    """
    logits, _ = self.decoder(decoder_input_tokens, None, decoder_segment_ids)
    return logits
