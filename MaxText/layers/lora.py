"""Low-rank adapters: a frozen matrix W becomes W + scale * B A, with B = 0 at the start.

An adapter hangs on the module whose matrix it changes; a module without one computes as before. Adapters are
float32 whatever the weights are, and the only `LoRAParam` of a model.

Dims: r rank, O output and D input channels of the matrix, E experts, M rows sorted by expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.kernels.grouped_matmul import Impl, grouped_matmul
from MaxText.layers.cache import Row

LoRAParam = nnx.LoRAParam
Axes = tuple[str | None, ...]


class Adapter(nnx.Module):
  """The change of one matrix [O, D], or of a stack of them."""

  def __init__(self, cfg: Config, shape: tuple[int, ...], axes: Axes, *, rngs: nnx.Rngs):
    """Hangs on a matrix of `shape` [.., O, D] with those logical axes."""
    *stack, out, width = shape
    *names, out_name, width_name = axes
    self.scale = cfg.lora_alpha / cfg.lora_rank
    self.a = _down(rngs, (*stack, cfg.lora_rank, width), (*names, None, width_name))
    self.b = _up(rngs, (*stack, out, cfg.lora_rank), (*names, out_name, None))

  def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B O"]:
    """Returns what the adapter adds to the product of x [..., D], in x.dtype."""
    low = _einsum("...d,rd->...r", x, self.a[...])
    return (self.scale * _einsum("...r,or->...o", low, self.b[...])).astype(x.dtype)

  def change(self) -> Float[Array, "*C O D"]:
    """Returns scale * B A, [..., O, D] float32."""
    return self.scale * _einsum("...or,...rd->...od", self.b[...], self.a[...])


class ExpertChange(NamedTuple):
  """The arrays of an `ExpertAdapter`, or those of the experts that one device holds.

  Attributes:
    a: [.., r, D] shared by the experts, or [.., E, r, D].
    b: [.., E, O, r].
    scale: alpha / rank; rows take it, since a stack would be scaled whole at each of its layers.
  """

  a: Float[Array, "*CE r D"]
  b: Float[Array, "*C E O r"]
  scale: Float[Array, ""]

  @property
  def shared(self) -> bool:
    """Whether the experts share A."""
    return self.a.ndim < self.b.ndim

  def __call__(
    self, x: Float[Array, "M D"], group_sizes: Int[Array, "E"], row: Row, impl: Impl
  ) -> Float[Array, "M O"]:
    """Returns what the adapter adds to each row's product.

    Args:
      x: [M, D] float32 rows, those of expert 0 first.
      group_sizes: [E] rows of each expert.
      row: which layer of a stack.
      impl: of the grouped products.

    Returns:
      [M, O] float32; 0 past the last group.
    """
    if self.shared:
      low = _einsum("md,rd->mr", x, self.a if row is None else self.a[row])
    else:
      low = grouped_matmul(x, self.a, group_sizes, layer=row, impl=impl)
    return grouped_matmul(self.scale * low, self.b, group_sizes, layer=row, impl=impl)


class ExpertAdapter(nnx.Module):
  """The change of one matrix [E, O, D] of all experts of a layer.

  With `lora_experts: shared_a` the experts share A and each has its B. With `per_expert` each has both, of
  rank lora_rank / num_experts_per_tok, so that a token meets as many adapter weights as in a dense matrix.
  """

  def __init__(self, cfg: Config, shape: tuple[int, ...], axes: Axes, *, rngs: nnx.Rngs):
    """Hangs on a matrix of `shape` [.., E, O, D] with those logical axes."""
    *stack, experts, out, width = shape
    *names, expert_name, out_name, width_name = axes
    self.shared = cfg.lora_experts == "shared_a"
    rank = cfg.lora_rank if self.shared else max(1, cfg.lora_rank // cfg.num_experts_per_tok)
    self.scale = cfg.lora_alpha / cfg.lora_rank
    lead, lead_names = (stack, names) if self.shared else ((*stack, experts), (*names, expert_name))
    self.a = _down(rngs, (*lead, rank, width), (*lead_names, None, width_name))
    self.b = _up(rngs, (*stack, experts, out, rank), (*names, expert_name, out_name, None))

  def arrays(self) -> ExpertChange:
    """Returns the change as arrays, to be applied to rows."""
    return ExpertChange(self.a[...], self.b[...], jnp.float32(self.scale))

  def change(self) -> Float[Array, "*C E O D"]:
    """Returns scale * B A, [..., E, O, D] float32."""
    equation = "...eor,...rd->...eod" if self.shared else "...eor,...erd->...eod"
    return self.scale * _einsum(equation, self.b[...], self.a[...])


def _down(rngs, shape, axes):
  return params.param(rngs, shape, axes, "float32", params.kaiming_uniform(shape[-1]), LoRAParam)


def _up(rngs, shape, axes):
  return params.param(rngs, shape, axes, "float32", params.zeros, LoRAParam)


def _einsum(equation, x, weight):
  return jnp.einsum(equation, x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
