"""Our decoder behind the call that maxtext's loss makes, with the axis names that its sharding reads."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.models import registry

_BIAS = "e_score_correction_bias"


class RouterBias(nnx.Variable):
  """A router's selection bias. No parameter: no gradient, no optimizer and no weight decay touches it."""


class BaseWeight(nnx.Variable):
  """A weight that its adapters leave as it is: no parameter, so no gradient and no optimizer state."""


class ExpertCounts(nnx.Variable):
  """Tokens that each expert got since its router's bias was last moved."""


class TrainedDecoder(nnx.Module):
  """What maxtext trains: a KimiDecoder, called without a cache.

  Attributes:
    decoder: the model that decodes, unchanged but for the kind of its router biases.
    expert_counts: [moe_layers, E] int32, added to by every call, over all parts of a batch.
    mesh: devices, read by maxtext's loss.
  """

  def __init__(self, cfg: Config, mesh: jax.sharding.Mesh, *, rngs: nnx.Rngs):
    self.mesh = mesh
    self.decoder = registry.build(cfg, rngs)
    for _, module in nnx.iter_graph(self.decoder):
      if isinstance(module, nnx.Module) and hasattr(module, _BIAS):
        bias = getattr(module, _BIAS)
        setattr(module, _BIAS, RouterBias(bias.get_value(), axes=bias.get_metadata("axes")))
    if cfg.lora_rank:
      _freeze_base(self.decoder)
    for _, variable in nnx.iter_graph(self.decoder):
      if isinstance(variable, nnx.Param | params.Frozen | RouterBias | BaseWeight):
        variable.set_metadata(out_sharding=variable.get_metadata("axes"))

    moe_layers = [kind for _, kind in self.decoder.plan.kinds if kind == "moe"]
    self.expert_counts = ExpertCounts(jnp.zeros((len(moe_layers), cfg.num_experts), jnp.int32))

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
    h, counts = self.decoder.hidden_and_counts(decoder_input_tokens, decoder_segment_ids)
    self.expert_counts.set_value(self.expert_counts[...] + counts)
    return self.decoder.logits(h)

  def balance_routers(self, rate: float) -> Float[Array, ""]:
    """Moves every router's bias towards equal loads, by what its experts got since the last time.

    Args:
      rate: size of the step; 0 leaves the biases.

    Returns:
      Load of the busiest expert of any layer, as a multiple of the layer's mean.
    """
    counts = self.expert_counts[...]
    if rate:
      self.decoder.balance_routers(counts, rate)
    self.expert_counts.set_value(jnp.zeros_like(counts))
    loads = counts / jnp.maximum(jnp.mean(counts, axis=-1, keepdims=True), 1)
    return jnp.max(loads, initial=0)


def _freeze_base(decoder: nnx.Module) -> None:
  """Makes every weight but those of adapters a `BaseWeight`, in place: maxtext trains what is a parameter."""
  for _, module in list(nnx.iter_graph(decoder)):
    if isinstance(module, nnx.Module):
      for name, variable in list(vars(module).items()):
        if isinstance(variable, nnx.Param) and not isinstance(variable, nnx.LoRAParam):
          frozen = BaseWeight(variable.get_value(), axes=variable.get_metadata("axes"))
          setattr(module, name, frozen)
