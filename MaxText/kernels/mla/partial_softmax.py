"""Attention over a part of the keys, and how parts become a whole.

A part is a sum of values under unnormalised weights, the largest score and the sum of the weights. Parts
merge by their largest scores in any order; a part in which a query sees no key adds nothing and is never NaN.

Dims: B batch, T queries, J keys, H heads, D key width, X value width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

# finite, so that the difference of two empty parts is 0 and not NaN
LOWEST = -1e30


class Part(NamedTuple):
  """Attention over some keys.

  Attributes:
    acc: [B, H, T, X] sum of exp(score - top) value.
    top: [B, H, T] largest score, LOWEST where no key is seen.
    total: [B, H, T] sum of exp(score - top).
  """

  acc: Float32[Array, "B H T X"]
  top: Float32[Array, "B H T"]
  total: Float32[Array, "B H T"]


def einsum_f32(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float32[Array, "..."]:
  """Multiplies in the operands' dtype and accumulates in float32; float32 operands keep full precision.

  XLA:CPU lacks some bfloat16 x bfloat16 -> float32 products and is slow at the others, so there the operands
  are widened first. The checkpoint keeps the widened copies out of what a backward pass saves.
  """
  if a.dtype == b.dtype == jnp.float32:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)

  def widened(a, b):
    return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32))

  def mixed(a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

  return jax.checkpoint(lambda a, b: lax.platform_dependent(a, b, cpu=widened, default=mixed))(a, b)


def empty_part(queries: Float[Array, "B T H D"], width: int) -> Part:
  """Returns the part of no keys for queries [B, T, H, D] and values of the given width."""
  B, T, H, _ = queries.shape
  top = jnp.full((B, H, T), LOWEST, jnp.float32)
  return Part(acc=jnp.zeros((B, H, T, width), jnp.float32), top=top, total=jnp.zeros_like(top))


def attend_part(
  queries: Float[Array, "B T H D"],
  keys: Float[Array, "B J *H D"],
  values: Float[Array, "B J *H X"],
  seen: Bool[Array, "#B #T J"],
  scale: float,
) -> Part:
  """Attends over one block of keys.

  Args:
    queries: [B, T, H, D].
    keys: [B, J, H, D], or [B, J, D] when all heads share them.
    values: [B, J, H, X], or [B, J, X].
    seen: [B, T, J] whether the query may look at the key; either leading axis may be 1.
    scale: factor on the scores.

  Returns:
    the part of these keys.
  """
  heads = "h" if keys.ndim == 4 else ""
  seen = seen[:, None]
  scores = jnp.where(seen, scale * einsum_f32(f"bthd,bj{heads}d->bhtj", queries, keys), LOWEST)
  top = lax.stop_gradient(jnp.max(scores, axis=-1))
  weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
  acc = einsum_f32(f"bhtj,bj{heads}x->bhtx", weights.astype(values.dtype), values)
  return Part(acc=acc, top=top, total=jnp.sum(weights, axis=-1))


def merge_parts(one: Part, other: Part) -> Part:
  """Joins the parts of two disjoint sets of keys."""
  top = jnp.maximum(one.top, other.top)
  left, right = jnp.exp(one.top - top), jnp.exp(other.top - top)
  acc = one.acc * left[..., None] + other.acc * right[..., None]
  return Part(acc=acc, top=top, total=one.total * left + other.total * right)


def finish_part(part: Part) -> Float32[Array, "B T H X"]:
  """Normalises; a query that saw no key gives 0. Returns [B, T, H, X]."""
  seen = part.total > 0
  out = part.acc / jnp.where(seen, part.total, 1)[..., None]
  return jnp.swapaxes(out, 1, 2)
