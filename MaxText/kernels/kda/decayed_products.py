"""Products of all pairs of rows and earlier keys, decayed over the tokens between them.

The decay from token j to token i is the product of the factors of tokens j+1..i. It is built up from those
factors, each in [0, 1], block by block, and never as a ratio of cumulative products: nothing overflows, and
slow decays keep their digits behind fast ones, whatever the strength of the gate.

Dims: L tokens of a block, Z left factors per token, K key width. Source: spec section 2.4, "chunkwise form".
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
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
  rows = rows.reshape(*lead, L // size, size, Z, K)
  keys, decay = (x.reshape(*lead, L // size, size, K) for x in (keys, decay))
  diagonal, inner = decayed_products(rows, keys, decay, blocks[1:])
  near, far = rows * inner.since[..., None, :], keys * inner.until
  bands, reaching = [], None
  for a in range(L // size):
    band = [diagonal[..., a, :, :, :], jnp.zeros((*lead, size, Z, L - (a + 1) * size), rows.dtype)]
    if reaching is not None:
      band.insert(0, _einsum("...izk,...jk->...izj", near[..., a, :, :, :], reaching))
      reaching = reaching * inner.total[..., a, None, :]
    bands.append(jnp.concatenate(band, axis=-1))
    own = far[..., a, :, :]
    reaching = own if reaching is None else jnp.concatenate([reaching, own], axis=-2)
  return jnp.concatenate(bands, axis=-3), _joined(inner)


def _joined(inner):
  """Decays across all blocks from those across each: [..., L / size, size, K] -> [..., L, K]."""
  *lead, n, size, K = inner.since.shape
  before, after = [jnp.ones_like(inner.total[..., 0, :])], [jnp.ones_like(inner.total[..., 0, :])]
  for a in range(n):
    before.append(before[-1] * inner.total[..., a, :])
    after.append(after[-1] * inner.total[..., n - 1 - a, :])
  since = inner.since * jnp.stack(before[:-1], axis=-2)[..., None, :]
  until = inner.until * jnp.stack(after[-2::-1], axis=-2)[..., None, :]
  return Decays(since.reshape(*lead, n * size, K), until.reshape(*lead, n * size, K), before[-1])


def _innermost(rows, keys, decay):
  """Products from the decay of every single pair."""
  L = keys.shape[-2]
  one = jnp.ones_like(decay[..., :1, :])
  reach, between = one, []
  for i in range(L):
    if i > 0:
      reach = jnp.concatenate([reach * decay[..., i : i + 1, :], one], axis=-2)
    between.append(jnp.concatenate([reach] + [jnp.zeros_like(one)] * (L - 1 - i), axis=-2))
  between = jnp.stack(between, axis=-3)
  # sums, not dots: a [Z, K] x [K, L] product is too thin for a matrix unit
  products = jnp.sum(rows[..., None, :] * (between * keys[..., None, :, :])[..., None, :, :], axis=-1)
  since = between[..., :, 0, :] * decay[..., :1, :]
  return products, Decays(since, between[..., -1, :, :], since[..., -1, :])
