"""Grouped products by a loop over the experts that have rows.

The outer loop takes one expert's weights out of the stack (and out of their bytes), the inner loop runs over
tiles of that expert's rows. A tile is a slice of static height that may reach into the next group: what it
writes there is overwritten by the next tile, because tiles run in order of rows. So nothing is gathered, each
weight in use is read once, and an expert without rows never. The backward pass is the same loop over the
derivative of a tile.

Dims: M rows, E experts, L expert input width, F expert width, N output and K input channels of one weight.
Source: spec 2.7 step 4.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from MaxText.kernels.carries import match_manual_axes
from MaxText.kernels.grouped_matmul.operands import Activation, Weight
from MaxText.kernels.mxfp4 import MxFp4, unpack_halves

_CACHED = 1 << 20
"""Bytes of a weight that a core keeps in its second-level cache."""


def grouped_matmul(
  x: Float[Array, "M K"], w: Weight, group_sizes: Int[Array, " E"], layer: Int[Array, ""] | None = None
) -> Float[Array, "M N"]:
  """Visits the experts that have rows; arguments as the operation of that name in this package."""
  return _call(functools.partial(_product, _precision(x)), x, (w,), group_sizes, layer)


def grouped_mlp(
  x: Float[Array, "M L"],
  w1: Weight,
  w3: Weight,
  w2: Weight,
  group_sizes: Int[Array, " E"],
  activation: Activation,
  layer: Int[Array, ""] | None = None,
) -> Float[Array, "M L"]:
  """Visits the experts that have rows; arguments as the operation of that name in this package."""
  tile = functools.partial(_mlp, _precision(x), activation)
  return _call(tile, x, (w1, w3, w2), group_sizes, layer)


def _call(tile_fn, *operands):
  # inside shard_map the loops want one set of varying mesh axes; the cast's own transpose sums the gradients
  leaves = jax.tree.leaves(operands)
  return _visit(tile_fn, *jax.tree.map(lambda a: match_manual_axes(a, *leaves), operands))


def _precision(x):
  """Full precision for rows that came in as float32; widened bfloat16 rows have no more digits to keep."""
  return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def _mlp(precision, activation, x, w1, w3, w2):
  product = functools.partial(_product, precision)
  return product(activation(product(x, w1), product(x, w3)), w2)


def _product(precision, x, w):
  """x [rows, K] times the transpose of w [N, K], or of its even and odd channels."""
  if isinstance(w, tuple):
    return _product(precision, x[:, 0::2], w[0]) + _product(precision, x[:, 1::2], w[1])
  return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision)


def tile_height(num_rows: int, num_experts: int, weight_bytes: int) -> int:
  """Rows of a tile, from the mean size of a group.

  On a CPU one row at a time is best for small groups: XLA:CPU emits a matrix-vector product inline, and reads
  a weight that stays in the cache faster than its library packs it to multiply a few rows (measured with
  weights of 256 KiB, up to 32 rows a group). A larger weight is read once per tile instead.

  Args:
    num_rows: M.
    num_experts: E.
    weight_bytes: size of one expert's largest weight in float32.
  """
  mean = max(num_rows // num_experts, 1)
  on_cpu = jax.default_backend() == "cpu"
  if on_cpu and mean < (32 if weight_bytes <= _CACHED else 2):
    return 1
  return min(max(1 << mean.bit_length() - 1, 8), 64 if on_cpu else 128)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _visit(tile_fn, x, weights, group_sizes, layer):
  """Runs `tile_fn(rows, *weights)` on every tile, in float32; the result [M, N] is in x.dtype."""
  num_rows, height = x.shape[0], _height(x, weights, group_sizes)
  x = _pad(x, height)

  def visit(expert, start, stop, out):
    own = [_expert(w, layer, expert) for w in weights]

    def step(tile, out):
      y = tile_fn(_rows(x, start + tile * height, height), *own)
      return lax.dynamic_update_slice_in_dim(out, y.astype(out.dtype), start + tile * height, 0)

    return lax.fori_loop(0, _ceil_div(stop - start, height), step, out)

  out = _zeros((x.shape[0], weights[-1].shape[-2]), x.dtype, x)
  out = _each_expert(visit, group_sizes, out)
  return _clear_tail(out[:num_rows], group_sizes)


def _visit_forward(tile_fn, x, weights, group_sizes, layer):
  return _visit(tile_fn, x, weights, group_sizes, layer), (x, weights, group_sizes, layer)


def _visit_backward(tile_fn, residuals, grad):
  """Recomputes each tile; its derivative goes to its rows and, summed over the group, to its weights."""
  x, weights, group_sizes, layer = residuals
  num_rows, height = x.shape[0], _height(x, weights, group_sizes)
  x, grad = _pad(x, height), _pad(grad, height)
  plain = [i for i, w in enumerate(weights) if not isinstance(w, MxFp4)]

  def visit(expert, start, stop, carry):
    own = [_expert(w, layer, expert) for w in weights]

    def step(tile, carry):
      dx, sums = carry
      first = start + tile * height
      mine = (first + jnp.arange(height) < stop)[:, None]
      rows, cotangent = (jnp.where(mine, _rows(a, first, height), 0) for a in (x, grad))
      drows, *deltas = jax.vjp(tile_fn, rows, *own)[1](cotangent)
      dx = lax.dynamic_update_slice_in_dim(dx, drows.astype(dx.dtype), first, 0)
      return dx, [s + deltas[i] for s, i in zip(sums, plain)]

    dx, totals = carry
    sums = [_zeros(own[i].shape, jnp.float32, x) for i in plain]
    dx, sums = lax.fori_loop(0, _ceil_div(stop - start, height), step, (dx, sums))
    return dx, [_put(t, layer, expert, s) for t, s in zip(totals, sums)]

  carry = _zeros(x.shape, x.dtype, x), [_zeros(weights[i].shape, weights[i].dtype, x) for i in plain]
  dx, totals = _each_expert(visit, group_sizes, carry)
  dweights = dict(zip(plain, totals))
  return _clear_tail(dx[:num_rows], group_sizes), tuple(map(dweights.get, range(len(weights)))), None, None


_visit.defvjp(_visit_forward, _visit_backward)


def _height(x, weights, group_sizes):
  largest = max(4 * w.shape[-2] * w.shape[-1] for w in weights)
  return tile_height(x.shape[0], group_sizes.shape[0], largest)


def _each_expert(visit, group_sizes, carry):
  """Folds `visit(expert, first row, end of its rows, carry)` over the experts that have rows."""
  last = group_sizes.shape[0] - 1

  def is_empty(expert):
    # under vmap a row of the batch that is done runs on with the others and must not search for ever
    return (group_sizes[expert] == 0) & (expert < last)

  def step(_, state):
    expert, start, carry = state
    expert = lax.while_loop(is_empty, lambda e: e + 1, expert)
    stop = start + group_sizes[expert]
    return expert + 1, stop, visit(expert, start, stop, carry)

  zero = _zeros((), jnp.int32, group_sizes)
  return lax.fori_loop(0, jnp.count_nonzero(group_sizes), step, (zero, zero, carry))[2]


def _zeros(shape, dtype, like):
  """A loop's first carry, of the manual axes of `like`."""
  return match_manual_axes(jnp.zeros(shape, dtype), like)


def _ceil_div(a, b):
  return (a + b - 1) // b


def _pad(x, height):
  """Adds the rows that the last tile may reach into."""
  return jnp.pad(x, ((0, height - 1), (0, 0)))


def _rows(x, first, height):
  return lax.dynamic_slice_in_dim(x, first, height).astype(jnp.float32)


def _clear_tail(out, group_sizes):
  """Zeros the rows past the last group, where the last tile may have written."""
  return jnp.where(jnp.arange(out.shape[0])[:, None] < group_sizes.sum(), out, 0)


def _position(layer, expert):
  return (expert, 0, 0) if layer is None else (layer, expert, 0, 0)


def _expert(w, layer, expert):
  """The float32 weight [N, K] of one expert; bytes are unpacked here, into even and odd channels."""

  def pick(a):
    one = (1,) * (a.ndim - 2) + a.shape[-2:]
    return lax.dynamic_slice(a, _position(layer, expert), one).reshape(a.shape[-2:])

  w = jax.tree.map(pick, w)
  return unpack_halves(w) if isinstance(w, MxFp4) else w.astype(jnp.float32)


def _put(total, layer, expert, value):
  """Writes the gradient [N, K] of one expert, in place inside a loop."""
  value = value.astype(total.dtype).reshape((1,) * (total.ndim - 2) + value.shape)
  return lax.dynamic_update_slice(total, value, _position(layer, expert))
