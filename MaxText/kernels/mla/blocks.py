"""Which keys a query sees, and the loops over blocks of keys.

Dims: B batch, T new tokens, S cache slots, J keys of a block, H heads, D key width, X value width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from MaxText.kernels.carries import match_manual_axes
from MaxText.kernels.mla.pages import Rows, capacity, read_rows
from MaxText.kernels.mla.partial_softmax import Part, attend_part, empty_part, merge_parts
from MaxText.kernels.segments import document_order

# up to this many keys, one block holds them all
SINGLE_BLOCK = 1024
BLOCK = 512


def visible_documents(segment_ids: Int[Array, "B T"] | None, batch: int, length: int) -> Int[Array, "B T"]:
  """Returns each token's document number [B, T], 0 for the first one and -1 for padding."""
  if segment_ids is None:
    return jnp.zeros((batch, length), jnp.int32)
  order, valid = document_order(segment_ids)
  return jnp.where(valid, order, -1)


def attend_own(
  queries: Float[Array, "B T H D"],
  keys: Float[Array, "B T *H D"],
  values: Float[Array, "B T *H X"],
  documents: Int[Array, "B T"],
  scale: float,
) -> Part:
  """Attends causally among the new tokens.

  Above 1024 tokens, blocks of queries meet blocks of keys one pair at a time; pairs above the diagonal are
  skipped, and the backward pass recomputes each pair.

  Args:
    queries: [B, T, H, D].
    keys: [B, T, H, D] or, shared by the heads, [B, T, D].
    values: [B, T, H, X] or [B, T, X].
    documents: [B, T] document of each token, -1 for padding.
    scale: factor on the scores.
  """
  T = queries.shape[1]
  if T <= SINGLE_BLOCK:
    position = jnp.arange(T)
    return attend_part(queries, keys, values, _own_mask(position, position, documents, documents), scale)
  blocks = tuple(_split(x) for x in (queries, keys, values, documents))
  count = blocks[0].shape[0]
  indices = jnp.arange(count)

  def query_block(query):
    index, queries, wanted = query

    @jax.checkpoint
    def pair(part, key):
      other, keys, values, held = key
      offset = jnp.arange(BLOCK)
      seen = _own_mask(index * BLOCK + offset, other * BLOCK + offset, wanted, held)
      return merge_parts(part, attend_part(queries, keys, values, seen, scale))

    def body(part, key):
      return lax.cond(key[0] <= index, pair, lambda part, _: part, part, key), None

    start = _start(queries, values, queries, keys, values, documents)
    return lax.scan(body, start, (indices, *blocks[1:]))[0]

  parts = lax.map(jax.checkpoint(query_block), (indices, blocks[0], blocks[3]))
  return Part(*(_joined(x, T) for x in parts))


def attend_prefix(
  queries: Float[Array, "B T H D"],
  expand: Callable[[Array], tuple[Array, Array]],
  width: int,
  prefix: tuple[Rows, Int[Array, "B"]],
  documents: Int[Array, "B T"],
  scale: float,
) -> Part:
  """Attends from the tokens of the first document to the cached rows.

  Blocks are read up to the longest row: the cost follows the tokens held and not the capacity.

  Args:
    queries: [B, T, H, D].
    expand: cache rows [B, J, Y] -> keys [B, J, H, D] and values [B, J, H, X], or without the head axis.
    width: value width X.
    prefix: cache rows [B, S, Y], or pages of them, and the number held in each, [B].
    documents: [B, T] document of each token, -1 for padding.
    scale: factor on the scores.
  """
  rows, length = prefix
  S = capacity(rows)
  size = S if S <= SINGLE_BLOCK else BLOCK

  def attend(start, first, block):
    slot = start + jnp.arange(size)
    held = (slot >= first) & (slot < length[:, None])
    seen = (documents == 0)[:, :, None] & held[:, None]
    return attend_part(queries, *expand(block), seen, scale)

  if size == S:
    return attend(0, 0, read_rows(rows, 0, S, length))

  def body(index, part):
    start = jnp.minimum(index * size, S - size)
    return merge_parts(part, attend(start, index * size, read_rows(rows, start, size, length)))

  count = (jnp.max(length) + size - 1) // size
  start = jax.tree.map(
    lambda x: match_manual_axes(x, queries, *jax.tree.leaves(rows), length), empty_part(queries, width)
  )
  return lax.fori_loop(0, count, body, start)


def _own_mask(query, key, wanted, held) -> Bool[Array, "B T J"]:
  same = (wanted[:, :, None] == held[:, None, :]) & (wanted >= 0)[:, :, None]
  return same & (query[:, None] >= key[None, :])


def _split(x):
  """[B, T, ...] -> [T / BLOCK, B, BLOCK, ...]; the added keys lie after every query."""
  B, T = x.shape[:2]
  x = jnp.pad(x, [(0, 0), (0, -T % BLOCK)] + [(0, 0)] * (x.ndim - 2))
  return jnp.moveaxis(x.reshape(B, -1, BLOCK, *x.shape[2:]), 1, 0)


def _joined(x, length):
  """[n, B, H, BLOCK, ...] -> [B, H, length, ...]."""
  x = jnp.moveaxis(x, 0, 2)
  return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length]


def _start(queries, values, *inputs):
  part = empty_part(queries, values.shape[-1])
  return jax.tree.map(lambda x: match_manual_axes(x, *inputs), part)
