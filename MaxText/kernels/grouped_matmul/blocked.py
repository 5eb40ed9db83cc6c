"""Grouped products by a loop over blocks of rows of one expert.

The rows of an expert are visited in blocks of static height. A block takes its rows by one slice that may
reach into the next group: what it writes there is overwritten by the next block, because blocks run in order
of rows. So nothing is gathered, scattered or padded per expert, and the trip count is the number of blocks in
use: an expert without rows is never read. The backward pass is the same loop over the block's own derivative.

Dims: M rows, E experts, L expert input width, F expert width, N output and K input channels of one weight,
R rows of a block.
Source: spec 2.7 step 4.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from MaxText.kernels.mxfp4 import MxFp4, unpack


class Blocks(NamedTuple):
  """Where each block of rows starts and whose it is.

  Attributes:
    expert: [blocks] expert of the block.
    start: [blocks] its first row.
    rows: [blocks] its rows, at most R.
    used: number of blocks that have rows; the others are not visited.
  """

  expert: Int[Array, " blocks"]
  start: Int[Array, " blocks"]
  rows: Int[Array, " blocks"]
  used: Int[Array, ""]


def block_height(num_rows: int, num_experts: int) -> int:
  """Rows R of a block: near the mean group, so that few rows are padding and few weights are read twice."""
  mean = -(-num_rows // num_experts)
  return min(max(1 << (mean - 1).bit_length(), 1), 64)


def plan(group_sizes: Int[Array, " E"], num_rows: int, height: int) -> Blocks:
  """Cuts the groups into blocks of at most `height` rows.

  Args:
    group_sizes: [E] rows of each expert.
    num_rows: M, at least their sum.
    height: R, rows of a block.
  """
  num_experts = group_sizes.shape[0]
  count = -(-group_sizes // height)
  end = jnp.cumsum(count)
  block = jnp.arange(min(num_rows // height + num_experts, num_rows), dtype=jnp.int32)
  expert = jnp.searchsorted(end, block, side="right", method="compare_all")
  expert = jnp.minimum(expert, num_experts - 1).astype(jnp.int32)
  offset = (block - (end - count)[expert]) * height
  start = (jnp.cumsum(group_sizes) - group_sizes)[expert] + offset
  rows = jnp.minimum(group_sizes[expert] - offset, height)
  return Blocks(expert, start.astype(jnp.int32), rows.astype(jnp.int32), end[-1].astype(jnp.int32))


def grouped_matmul(x, w, group_sizes, layer=None):
  """See `kernels.grouped_matmul.grouped_matmul`."""
  return _visit(_product, x, (w,), group_sizes, layer)


def grouped_mlp(x, w1, w3, w2, group_sizes, activation, layer=None):
  """See `kernels.grouped_matmul.grouped_mlp`."""
  return _visit(functools.partial(_mlp, activation), x, (w1, w3, w2), group_sizes, layer)


def _product(x, w):
  return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def _mlp(activation, x, w1, w3, w2):
  return _product(activation(_product(x, w1), _product(x, w3)), w2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _visit(block_fn, x, weights, group_sizes, layer):
  """Runs `block_fn(rows [R, K], *weights [N, K])` on every block; both in float32, the result in x.dtype."""
  num_rows, height, blocks = _prepare(x, weights, group_sizes)
  x = _pad(x, height)
  width = weights[-1].shape[-2]

  def visit(i, out):
    rows = lax.dynamic_slice_in_dim(x, blocks.start[i], height).astype(jnp.float32)
    y = block_fn(rows, *(_expert(w, layer, blocks.expert[i]) for w in weights))
    return lax.dynamic_update_slice_in_dim(out, y.astype(x.dtype), blocks.start[i], 0)

  out = lax.fori_loop(0, blocks.used, visit, jnp.zeros((x.shape[0], width), x.dtype))
  return _real_rows(out, num_rows, group_sizes)


def _visit_forward(block_fn, x, weights, group_sizes, layer):
  return _visit(block_fn, x, weights, group_sizes, layer), (x, weights, group_sizes, layer)


def _visit_backward(block_fn, residuals, grad):
  """Recomputes each block and adds its derivative to the gradients of its rows and of its expert."""
  x, weights, group_sizes, layer = residuals
  num_rows, height, blocks = _prepare(x, weights, group_sizes)
  x, grad = _pad(x, height), _pad(grad, height)
  plain = [i for i, w in enumerate(weights) if not isinstance(w, MxFp4)]

  def visit(i, totals):
    dx, dweights = totals
    expert, start = blocks.expert[i], blocks.start[i]
    own = jnp.arange(height)[:, None] < blocks.rows[i]
    rows, cotangent = (
      jnp.where(own, lax.dynamic_slice_in_dim(a, start, height), 0).astype(jnp.float32) for a in (x, grad)
    )
    _, pull = jax.vjp(block_fn, rows, *(_expert(w, layer, expert) for w in weights))
    drows, *deltas = pull(cotangent)
    dx = lax.dynamic_update_slice_in_dim(dx, drows.astype(dx.dtype), start, 0)
    return dx, [_accumulate(t, layer, expert, deltas[p]) for t, p in zip(dweights, plain)]

  zeros = (jnp.zeros_like(x), [jnp.zeros(weights[i].shape, jnp.float32) for i in plain])
  dx, totals = lax.fori_loop(0, blocks.used, visit, zeros)
  dweights = [None] * len(weights)
  for i, total in zip(plain, totals):
    dweights[i] = total.astype(weights[i].dtype)
  return _real_rows(dx, num_rows, group_sizes), tuple(dweights), None, None


_visit.defvjp(_visit_forward, _visit_backward)


def _prepare(x, weights, group_sizes):
  height = block_height(x.shape[0], group_sizes.shape[0])
  return x.shape[0], height, plan(group_sizes, x.shape[0], height)


def _pad(x, height):
  """Rows for the last block to reach into."""
  return jnp.pad(x, ((0, height - 1), (0, 0)))


def _real_rows(out, num_rows, group_sizes):
  """Drops the padding, and clears what the last block wrote past the last group."""
  return jnp.where(jnp.arange(num_rows)[:, None] < group_sizes.sum(), out[:num_rows], 0)


def _position(layer, expert):
  return (expert, 0, 0) if layer is None else (layer, expert, 0, 0)


def _expert(w, layer, expert):
  """The float32 weight [N, K] of one expert; bytes are unpacked here."""

  def pick(a):
    one = (1,) * (a.ndim - 2) + a.shape[-2:]
    return lax.dynamic_slice(a, _position(layer, expert), one).reshape(a.shape[-2:])

  w = jax.tree.map(pick, w)
  return unpack(w, jnp.float32) if isinstance(w, MxFp4) else w.astype(jnp.float32)


def _accumulate(total, layer, expert, delta):
  """Adds delta [N, K] to the gradient of one expert, in place inside a loop."""
  position = _position(layer, expert)
  delta = delta.reshape((1,) * (total.ndim - 2) + delta.shape)
  old = lax.dynamic_slice(total, position, delta.shape)
  return lax.dynamic_update_slice(total, old + delta, position)
