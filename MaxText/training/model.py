"""Our decoder behind the call that maxtext's loss makes, with the shardings that maxtext reads."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.models import registry
from MaxText.models.sharding import Layout

_BIAS = "e_score_correction_bias"


class RouterBias(nnx.Variable):
  """A router's selection bias. No parameter: no gradient, no optimizer and no weight decay touches it."""


class BaseWeight(nnx.Variable):
  """A weight that its adapters leave as it is: no parameter, so no gradient and no optimizer state."""


class ExpertCounts(nnx.Variable):
  """What the experts had to do since the routers' biases were last moved."""


class TrainedDecoder(nnx.Module):
  """What maxtext trains: a KimiDecoder, called without a cache.

  Attributes:
    decoder: the model that decodes, unchanged but for the kind of its router biases.
    expert_counts: [moe_layers, E] int32 tokens that chose each expert, added to by every call, over all parts
      of a batch.
    dropped: [] int32 choices that no device had room for, added to likewise; only with `moe_capacity_factor`.
    mesh: devices, read by maxtext's loss.
  """

  def __init__(self, cfg: Config, layout: Layout, *, rngs: nnx.Rngs):
    """Draws the weights.

    Args:
      cfg: the model.
      layout: of the devices, one or many.
      rngs: for the weights.
    """
    self.mesh = layout.mesh
    self.decoder = registry.build(cfg, rngs)
    if layout.mesh.size > 1:
      self.decoder.layout = layout
    for _, module in nnx.iter_graph(self.decoder):
      if isinstance(module, nnx.Module) and hasattr(module, _BIAS):
        bias = getattr(module, _BIAS)
        setattr(module, _BIAS, RouterBias(bias.get_value(), axes=bias.get_metadata("axes")))
    if cfg.lora_rank:
      _freeze_base(self.decoder)
    for _, variable in nnx.iter_graph(self.decoder):
      if isinstance(variable, nnx.Param | params.Frozen | RouterBias | BaseWeight):
        variable.set_metadata(out_sharding=layout.sharding(variable.get_metadata("axes")))

    moe_layers = [kind for _, kind in self.decoder.plan.kinds if kind == "moe"]
    self.expert_counts = ExpertCounts(jnp.zeros((len(moe_layers), cfg.num_experts), jnp.int32))
    if cfg.moe_capacity_factor is not None:
      self.dropped = ExpertCounts(jnp.int32(0))

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
    h, load = self.decoder.hidden_and_load(decoder_input_tokens, decoder_segment_ids)
    self.expert_counts.set_value(self.expert_counts[...] + load.chosen)
    if hasattr(self, "dropped"):
      self.dropped.set_value(self.dropped[...] + jnp.sum(load.dropped))
    return self.decoder.logits(h)

  def settle_experts(self, rate: float) -> dict[str, Shaped[Array, ""]]:
    """Moves every router's bias towards equal loads, by what its experts were chosen for since the last time.

    Args:
      rate: size of the step; 0 leaves the biases.

    Returns:
      `moe/busiest_expert`: load of the busiest expert of any layer, as a multiple of the layer's mean; with
      `moe_capacity_factor` also `moe/dropped_rows`: choices of an expert, in all layers, that had no room.
    """
    counts = self.expert_counts[...]
    if rate:
      self.decoder.balance_routers(counts, rate)
    self.expert_counts.set_value(jnp.zeros_like(counts))
    loads = counts / jnp.maximum(jnp.mean(counts, axis=-1, keepdims=True), 1)
    measured = {"moe/busiest_expert": jnp.max(loads, initial=0)}
    if hasattr(self, "dropped"):
      measured["moe/dropped_rows"] = self.dropped[...]
      self.dropped.set_value(jnp.int32(0))
    return measured


def _freeze_base(decoder: nnx.Module) -> None:
  """Makes every weight but those of adapters a `BaseWeight`, in place: maxtext trains what is a parameter."""
  for _, module in list(nnx.iter_graph(decoder)):
    if isinstance(module, nnx.Module):
      for name, variable in list(vars(module).items()):
        if isinstance(variable, nnx.Param) and not isinstance(variable, nnx.LoRAParam):
          frozen = BaseWeight(variable.get_value(), axes=variable.get_metadata("axes"))
          setattr(module, name, frozen)
