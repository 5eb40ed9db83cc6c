"""Latent mixture of experts: route on the hidden state, compute in a narrow latent. Source: spec 2.7.

Kimi-Linear is the same block without a latent: its experts read the hidden state itself.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.kernels.mxfp4 import BLOCK, MxFp4
from MaxText.layers.cache import Row
from MaxText.layers.expert_dispatch import ExpertMesh, OwnExperts, dispatch, rows_per_expert
from MaxText.layers.mlp import Mlp
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.projection import Projection
from MaxText.layers.router import Router

EXPERT_MATRICES = ("w1", "w3", "w2")
"""Gate, up and down, in the order in which the grouped product takes them."""


class ExpertLoad(NamedTuple):
  """What the routed experts of one layer, or of several, had to do.

  Attributes:
    chosen: [..., E] int32 tokens that chose each expert; what balances the routers.
    dropped: [...] int32 choices that no device had room for; 0 without `moe_capacity_factor`.
  """

  chosen: Int[Array, "*layers E"]
  dropped: Int[Array, "*layers"]


class LatentMoe(nnx.Module):
  """Router, routed experts in the latent, and shared experts on the hidden state."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    D, L = cfg.base_emb_dim, cfg.expert_input_dim
    self.cfg = cfg
    self.gate = Router(cfg, rngs=rngs)
    self.experts = Experts(cfg, rngs=rngs)
    if cfg.routed_expert_hidden_size is not None:
      self.routed_expert_down_proj = Projection(cfg, D, L, ("latent", "embed"), rngs=rngs)
      self.routed_expert_up_proj = Projection(cfg, L, D, ("embed", "latent"), rngs=rngs)
    if cfg.latent_moe_use_norm:
      self.routed_expert_norm = RMSNorm(
        L, cfg.normalization_layer_epsilon, cfg.parameter_dtype, rngs=rngs, axis="latent"
      )
    if cfg.shared_experts:
      self.shared_experts = Mlp(cfg, cfg.shared_experts * cfg.base_moe_mlp_dim, rngs=rngs)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    row: Row = None,
    place: ExpertMesh | None = None,
  ) -> tuple[Float[Array, "B T D"], ExpertLoad]:
    """Runs the block on x [B, T, D]; padding (segment 0) is sent to no expert and counted by none.

    Args:
      x: [B, T, D] normalised activations.
      segment_ids: [B, T], 0 = padding; None when every token is valid.
      row: which layer of stacked expert weights.
      place: the devices that share the experts, or None for one device.

    Returns:
      [B, T, D] in x.dtype, and the load of the E experts.
    """
    tokens = x.reshape(-1, x.shape[-1])
    ids, weights = self.gate(tokens)
    latent = self.cfg.routed_expert_hidden_size is not None
    z = self.routed_expert_down_proj(tokens) if latent else tokens
    valid = None if segment_ids is None else (segment_ids != 0).reshape(-1)
    y, counts = self.experts(z, ids, weights, valid, row=row, place=place)
    y = y.astype(x.dtype)
    if self.cfg.latent_moe_use_norm:
      # after the whole sum over experts: under expert parallelism the partial sums are reduced first
      y = self.routed_expert_norm(y)
    if latent:
      y = self.routed_expert_up_proj(y)
    y = y.reshape(x.shape)
    return (y + self.shared_experts(x) if self.cfg.shared_experts else y), self._load(ids, valid, counts)

  def _load(self, ids, valid, computed):
    """Compares the rows that the experts computed, [E], with those that chose them."""
    if self.cfg.moe_capacity_factor is None:
      return ExpertLoad(computed, jnp.int32(0))
    # not what was computed: an expert that loses rows is crowded, and must not be taken for an idle one
    chosen = _per_expert(ids, valid, self.cfg.num_experts)[1]
    return ExpertLoad(chosen, jnp.sum(chosen) - jnp.sum(computed))


class Experts(nnx.Module):
  """The routed experts of one layer (or, stacked, of all its cycles), plain or as resident MXFP4 bytes."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    E, L, F = cfg.num_experts, cfg.expert_input_dim, cfg.base_moe_mlp_dim
    self.cfg = cfg
    for name in EXPERT_MATRICES:
      down = name == "w2"
      shape = (E, L, F) if down else (E, F, L)
      axes = ("expert", "latent", "expert_mlp") if down else ("expert", "expert_mlp", "latent")
      if cfg.packs_experts:
        scale = params.Constant(_scale_byte(cfg.initializer_range))
        for part, inputs, init in (
          ("packed", shape[-1] // 2, jax.random.bits),
          ("scale", shape[-1] // BLOCK, scale),
        ):
          bytes_ = params.param(rngs, (*shape[:-1], inputs), axes, "uint8", init, params.Frozen)
          setattr(self, f"{name}_{part}", bytes_)
      else:
        draw = params.normal(cfg.initializer_range)
        setattr(self, name, params.param(rngs, shape, axes, cfg.parameter_dtype, draw))

  def __call__(
    self,
    z: Float[Array, "M L"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    valid: Bool[Array, "M"] | None,
    *,
    row: Row = None,
    place: ExpertMesh | None = None,
  ) -> tuple[Float[Array, "M L"], Int[Array, "E"]]:
    """Sums the chosen experts' outputs, products and sum in float32.

    Args:
      z: [M, L] what the experts read.
      ids: [M, A] chosen experts.
      weights: [M, A] float32 combine weights.
      valid: [M], false for padding; None when every token is valid.
      row: which layer of a stack.
      place: the devices that share the experts, or None for one device.

    Returns:
      [M, L] float32, and how many rows each expert got, [E] int32.
    """
    M, A = ids.shape
    E = self.cfg.num_experts
    experts = OwnExperts(self.cfg, tuple(map(self.weight, EXPERT_MATRICES)), row, self._changes())
    if place is not None:
      return dispatch(place, experts, z, ids, weights, jnp.ones(M, bool) if valid is None else valid)
    picks, group_sizes = _per_expert(ids, valid, E)
    order = jnp.argsort(picks, stable=True)
    sorted_out = experts(z[order // A], group_sizes)
    out = sorted_out[jnp.argsort(order)].reshape(M, A, -1).astype(jnp.float32)
    return jnp.sum(weights[..., None] * out, axis=1), group_sizes

  def _changes(self):
    """What the low-rank adapters of the three stacks add, None for a stack without one."""
    adapters = [getattr(self, f"{name}_lora", None) for name in EXPERT_MATRICES]
    return tuple(adapter and adapter.arrays() for adapter in adapters)

  def matrix(self, name: str) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    """Shape [.., E, out, in] and logical axes of one of the three stacks, packed or plain."""
    held = getattr(self, f"{name}_packed" if self.cfg.packs_experts else name)
    *shape, inputs = held.get_value().shape
    return (*shape, 2 * inputs if self.cfg.packs_experts else inputs), held.get_metadata("axes")

  def weight(self, name: str) -> Float[Array, "*C E N K"] | MxFp4:
    """One of the three stacks of expert matrices, in the published orientation [.., E, out, in]."""
    if self.cfg.packs_experts:
      return MxFp4(getattr(self, f"{name}_packed")[...], getattr(self, f"{name}_scale")[...])
    return getattr(self, name)[...]


def _per_expert(ids, valid, E):
  """The choices [M*A] in one line, E for those of padding, and how many fall on each expert, [E]."""
  picks = ids.reshape(-1) if valid is None else jnp.where(valid[:, None], ids, E).reshape(-1)
  return picks, rows_per_expert(picks, E)


def _scale_byte(stddev: float) -> int:
  """E8M0 byte under which uniformly drawn codes (root mean square 2.9) come close to `stddev`."""
  return 127 + round(math.log2(stddev / 2.9))
