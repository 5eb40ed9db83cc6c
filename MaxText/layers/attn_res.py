"""Attention residuals: the residual stream as a softmax mixture over closed blocks. Source: spec 2.3.

A `ResidualStream` lives for one forward pass. Blocks stay in one buffer [N, B, T, D]; how many of them are
closed may be a Python number (unrolled stack) or a traced one (scanned stack). Without blocks it is the plain
residual of Kimi-Linear.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.layers.normalization import RMSNorm


class AttnRes(nnx.Module):
  """A pseudo-query that scores the sources of the stream, one scalar per token and source."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    D = cfg.base_emb_dim
    self.norm = RMSNorm(D, cfg.normalization_layer_epsilon, cfg.parameter_dtype, rngs=rngs)
    # zero queries make the first mixtures uniform (spec 2.10)
    self.proj = params.param(rngs, (D,), ("norm",), cfg.parameter_dtype, params.zeros)

  def __call__(self, stream: "ResidualStream") -> Float[Array, "B T D"]:
    """Mixes the closed blocks and the running prefix into one view [B, T, D]."""
    weight = self.norm.scale[...].astype(jnp.float32) * self.proj[...].astype(jnp.float32)
    blocks, open_slots = stream.sources()
    scores = _score(blocks, weight, self.norm.eps)
    if open_slots is not None:
      scores = jnp.where(open_slots[:, None, None], -jnp.inf, scores)
    scores = jnp.concatenate([scores, _score(stream.prefix[None], weight, self.norm.eps)])
    share = jax.nn.softmax(scores, axis=0)[..., None]
    # sums, not dots: nine sources are too few for a matrix unit, and the mixture stays in float32
    mixed = jnp.sum(share[:-1] * blocks.astype(jnp.float32), axis=0)
    return (mixed + share[-1] * stream.prefix.astype(jnp.float32)).astype(stream.prefix.dtype)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class ResidualStream:
  """What flows through the depth of one forward pass.

  As a pytree a Python count of closed blocks is structure and no leaf, so that it stays a number inside
  `jax.checkpoint`.

  Attributes:
    prefix: [B, T, D] running sum since the last block was closed.
    blocks: [N, B, T, D] closed blocks in order, raw values; None for plain residuals.
    closed: how many of the N are closed; a Python int when the depth is unrolled.
  """

  prefix: Float[Array, "B T D"]
  blocks: Float[Array, "N B T D"] | None
  closed: int | Int[Array, ""]

  @classmethod
  def start(cls, cfg: Config, embedded: Float[Array, "B T D"]) -> "ResidualStream":
    """Starts a stream at the embeddings [B, T, D], with room for every block that the depth will close."""
    if cfg.attn_res_block_size is None:
      return cls(embedded, None, 0)
    N = -(-cfg.base_num_decoder_layers // cfg.attn_res_block_size)
    return cls(embedded, jnp.zeros((N, *embedded.shape), embedded.dtype), 0)

  def tree_flatten(self) -> tuple[tuple[Any, ...], int | None]:
    """Splits the stream into leaves and structure."""
    static = isinstance(self.closed, int)
    return (self.prefix, self.blocks, None if static else self.closed), self.closed if static else None

  @classmethod
  def tree_unflatten(cls, static: int | None, leaves: tuple[Any, ...]) -> "ResidualStream":
    """Puts a stream together again, from anything that stands in place of its arrays."""
    stream = object.__new__(cls)
    for name, value in zip(
      ("prefix", "blocks", "closed"), (*leaves[:2], leaves[2] if static is None else static)
    ):
      object.__setattr__(stream, name, value)
    return stream

  def sources(self) -> tuple[Float[Array, "N B T D"], Bool[Array, "N"] | None]:
    """Returns the blocks and which of them are still open (None when only closed ones are returned)."""
    if isinstance(self.closed, int):
      return self.blocks[: self.closed], None
    return self.blocks, jnp.arange(self.blocks.shape[0]) >= self.closed

  def add(self, value: Float[Array, "B T D"]) -> "ResidualStream":
    """Adds a sub-layer's output [B, T, D] to the prefix, in the activation dtype."""
    return dataclasses.replace(self, prefix=self.prefix + value.astype(self.prefix.dtype))

  def close_block(self, layer: int | Int[Array, ""], block_size: int | None) -> "ResidualStream":
    """At a layer that opens a block, stores the prefix as a closed block and restarts it at zero.

    Args:
      layer: 0-based depth; traced inside a scan.
      block_size: block length in layers, or None for plain residuals.
    """
    if block_size is None:
      return self
    opens = layer % block_size == 0
    if isinstance(opens, bool):
      return self._close(self.closed, jnp.zeros_like(self.prefix)) if opens else self
    slot = jnp.where(opens, self.closed, self.blocks.shape[0])  # out of range: nothing is written
    closed = self._close(slot, jnp.where(opens, jnp.zeros_like(self.prefix), self.prefix))
    return dataclasses.replace(closed, closed=self.closed + opens.astype(jnp.int32))

  def _close(self, slot: int | Int[Array, ""], prefix: Float[Array, "B T D"]) -> "ResidualStream":
    blocks = self.blocks.at[slot].set(self.prefix, mode="drop")
    return ResidualStream(prefix, blocks, self.closed + 1)


def _score(values: Float[Array, "N B T D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "N B T"]:
  values = values.astype(jnp.float32)
  return jnp.sum(values * weight, axis=-1) * jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1) + eps)
