"""A paged prefix is a prefix: scattered pages give the same attention, whoever wrote in them before."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from MaxText.kernels.mla import PageMesh, Pages, blocks, mla
from MaxText.kernels.mla.cases import TINY, random_inputs

SCALE = (TINY["N"] + TINY["P"]) ** -0.5
WIDTH = TINY["R"] + TINY["P"]
J = 8  # rows of a page
LENGTHS = [0, 13, 40]


@partial(jax.jit, static_argnames="impl")
def run(inputs, prefix, *, impl):
  return mla(*inputs, prefix=prefix, segment_ids=None, scale=SCALE, impl=impl)


def paged(rows, length, *, layers=None, fill=np.nan):
  """The held rows [B, S, Y] in shuffled pages; every other place of the pool holds `fill`."""
  B, S, _ = rows.shape
  order = np.random.default_rng(0).permutation(B * S // J + 3)
  pool = np.full((len(order), J, WIDTH), fill, np.float32)
  table = np.full((B, S // J), len(order), np.int32)
  for b in range(B):
    for n in range(-(-int(length[b]) // J)):
      table[b, n], order = order[0], order[1:]
      held = min(J, int(length[b]) - n * J)
      pool[table[b, n], :held] = rows[b, n * J : n * J + held]
  if layers is None:
    return Pages(jnp.asarray(pool[None]), jnp.asarray(table[None]))
  stack = np.full((layers, 1, *pool.shape), fill, np.float32)
  stack[1] = pool
  return Pages(jnp.asarray(stack), jnp.asarray(table[None]), jnp.int32(1))


@pytest.mark.parametrize("layers", [None, 3], ids=["own", "stacked"])
@pytest.mark.parametrize("impl", ["reference", "direct", "absorbed"])
@pytest.mark.parametrize("blocked", [False, True], ids=["one block", "blocks"])
def test_pages_equal_rows_and_hide_what_others_left(impl, layers, blocked, monkeypatch):
  if blocked:
    monkeypatch.setattr(blocks, "SINGLE_BLOCK", 16)
    monkeypatch.setattr(blocks, "BLOCK", 16)
  inputs = random_inputs(3, 3, **TINY)
  rows = np.asarray(jax.random.normal(jax.random.key(5), (3, 40, WIDTH)))
  length = jnp.int32(LENGTHS)
  got = run(inputs, (paged(rows, LENGTHS, layers=layers), length), impl=impl)
  want = run(inputs, (jnp.asarray(rows), length), impl=impl)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layers", [None, 3], ids=["own", "stacked"])
def test_writing_fills_the_pages_of_the_row_and_drops_the_rest(layers):
  pages = paged(np.ones((2, 16, WIDTH), np.float32), [9, 0], layers=layers, fill=-1)
  new = jnp.arange(1.0, 9.0).reshape(2, 4, 1) * jnp.ones(WIDTH)
  # row 0: behind its 9 rows, one unwanted, one past its pages; row 1 has no page at all
  after = pages.write(jnp.int32([[9, 10, -1, 16], [0, 1, 2, 3]]), new)
  read = np.asarray(after.read(0, 16, jnp.int32([16, 16])))[..., 0]
  assert read[0].tolist() == [1] * 9 + [1, 2] + [-1] * 5
  assert read[1].tolist() == [0] * 16
  changed = np.asarray(after.pool != pages.pool)[..., 0]
  assert changed.sum() == 2  # nothing else of the pool moved


def test_a_row_that_two_ranks_share_is_in_the_one_with_its_pages():
  pool = jnp.full((2, 3, J, WIDTH), np.nan)
  place = PageMesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), ("data",))
  pages = Pages(pool, jnp.int32([[[3, 3]], [[2, 0]]]), place=place)
  new = jax.random.normal(jax.random.key(1), (1, 11, WIDTH))
  after = pages.write(jnp.arange(11)[None], new)
  np.testing.assert_array_equal(after.read(0, 2 * J, jnp.int32([11]))[:, :11], new)
  assert np.isnan(after.pool[0]).all() and np.isfinite(after.pool[1]).all(-1).sum() == 11
