"""Products of all pairs of rows and earlier keys, decayed over the tokens between them.

The decay from token j to token i is the product of the factors of tokens j+1..i. It is built up from those
factors, each in [0, 1], block by block, and never as a ratio of cumulative products: nothing overflows, and
slow decays keep their digits behind fast ones, whatever the strength of the gate.

Dims: L tokens of a block, Z left factors per token, K key width. Source: spec section 2.4, "chunkwise form".
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Decays(NamedTuple):
  """Decays across one block.

  Attributes:
    since: [..., L, K] from before the block to each token, its own factor included.
    until: [..., L, K] from each token to the end of the block, its own factor excluded.
    total: [..., K] over the whole block.
  """

  since: Float32[Array, "... L K"]
  until: Float32[Array, "... L K"]
  total: Float32[Array, "... K"]


def decayed_products(
  rows: Float32[Array, "... L Z K"],
  keys: Float32[Array, "... L K"],
  decay: Float32[Array, "... L K"],
  blocks: tuple[int, ...],
) -> tuple[Float32[Array, "... L Z L"], Decays]:
  """Multiplies each row with each key at or before it.

  Products of block a with the blocks before it factor through the boundary before a: rows decay from there,
  keys up to there. Diagonal blocks recurse; the innermost take every pair's own decay.

  Args:
    rows: [..., L, Z, K] left factors.
    keys: [..., L, K] right factors.
    decay: [..., L, K] factor of each token, in [0, 1].
    blocks: block sizes from outer to inner; each divides the one before it, the first divides L.

  Returns:
    products [..., L, Z, L], sum over K of rows_i keys_j times the decay from j to i, 0 for j > i; and the
    decays across the L tokens.
  """
  if not blocks:
    return _innermost(rows, keys, decay)
  *lead, L, Z, K = rows.shape
  size = blocks[0]
  n = L // size
  rows = rows.reshape(*lead, n, size, Z, K)
  keys, decay = (x.reshape(*lead, n, size, K) for x in (keys, decay))
  diagonal, inner = decayed_products(rows, keys, decay, blocks[1:])
  across = _crossings(inner.total)
  near = rows * inner.since[..., None, :]
  far = (keys * inner.until)[..., None, : n - 1, :, :] * across[..., 1:n, 1:n, None, :]
  below = _einsum("...aizk,...abjk->...aizbj", near[..., 1:, :, :, :], far)
  below = jnp.pad(below, [(0, 0)] * len(lead) + [(1, 0), (0, 0), (0, 0), (0, 1), (0, 0)])
  products = below + jnp.eye(n)[:, None, None, :, None] * diagonal[..., None, :]
  decays = Decays(
    since=(inner.since * across[..., :n, 0, None, :]).reshape(*lead, L, K),
    until=(inner.until * across[..., n, 1:, None, :]).reshape(*lead, L, K),
    total=across[..., n, 0, :],
  )
  return products.reshape(*lead, L, Z, L), decays


def _innermost(rows, keys, decay):
  """Products from the decay of every single pair."""
  across = _crossings(decay)
  decayed = across[..., 1:, 1:, :] * keys[..., None, :, :]
  # sums, not dots: a [Z, K] x [K, L] product is too thin for a matrix unit
  products = jnp.sum(rows[..., None, :] * decayed[..., None, :, :], axis=-1)
  return products, Decays(across[..., 1:, 0, :], across[..., -1, 1:, :], across[..., -1, 0, :])


def _crossings(factors):
  """[..., n, K] -> [..., n + 1, n + 1, K]: from boundary b to boundary a the product of b..a-1, 0 for b > a."""
  n = factors.shape[-2]
  a, b = np.ogrid[: n + 1, : n + 1]
  across = jnp.asarray(b <= a, factors.dtype)[..., None]
  for c in range(n):
    crossed = ((b <= c) & (c < a))[..., None]
    across = across * jnp.where(crossed, factors[..., None, None, c, :], 1)
  return across
