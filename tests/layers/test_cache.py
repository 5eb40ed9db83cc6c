"""Cache writes: who is stored where, and what is left alone."""

import jax.numpy as jnp
import numpy as np

from MaxText.layers.cache import KdaCache, MlaCache, MlaPages


def filled(lengths, S=8, width=3, stack=()):
  latent = jnp.full((*stack, len(lengths), S, width), -1.0)
  return MlaCache(latent, jnp.broadcast_to(jnp.int32(lengths), (*stack, len(lengths))))


def tokens(B, T, width=3):
  return jnp.arange(1, B * T + 1, dtype=jnp.float32).reshape(B, T, 1) * jnp.ones(width)


def stored(cache, b):
  return np.asarray(cache.latent[b, :, 0]).tolist()


def test_rows_of_unequal_length_append_behind_their_own_end():
  cache = filled([0, 3]).append(tokens(2, 2), None)
  assert stored(cache, 0) == [1, 2, -1, -1, -1, -1, -1, -1]
  assert stored(cache, 1) == [-1, -1, -1, 3, 4, -1, -1, -1]
  assert cache.length.tolist() == [2, 5]


def test_padding_left_right_and_between_is_not_stored():
  segments = jnp.int32([[0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
  cache = filled([1, 0, 2]).append(tokens(3, 4), segments)
  assert stored(cache, 0)[:4] == [-1, 2, 3, -1]
  assert stored(cache, 1)[:3] == [5, 7, -1]
  assert stored(cache, 2) == [-1] * 8
  assert cache.length.tolist() == [3, 2, 2]


def test_a_row_that_ends_in_another_document_keeps_that_one_only():
  cache = filled([2]).append(tokens(1, 5), jnp.int32([[4, 4, 7, 7, 0]]))
  assert stored(cache, 0)[:3] == [3, 4, -1]
  assert cache.length.tolist() == [2]


def test_a_row_past_the_end_is_dropped_not_wrapped():
  cache = filled([7]).append(tokens(1, 3), None)
  assert stored(cache, 0) == [-1] * 7 + [1]
  assert cache.length.tolist() == [8]


def test_a_stacked_pool_writes_its_own_row_only():
  pool, row = filled([1, 0], stack=(3,)), jnp.int32(1)
  cache = pool.write(row, pool.read(row).append(tokens(2, 1), None))
  assert np.all(cache.latent[jnp.array([0, 2])] == -1)
  assert stored(MlaCache(cache.latent[1], cache.length[1]), 0)[:2] == [-1, 1]
  assert cache.length.tolist() == [[1, 0], [2, 1], [1, 0]]


def test_kda_memory_keeps_its_stored_dtypes():
  cache = KdaCache(jnp.zeros((2, 1, 3, 3, 4), jnp.bfloat16), jnp.zeros((2, 1, 1, 4, 5)))
  new = KdaCache(jnp.ones((1, 3, 3, 4)), jnp.ones((1, 1, 4, 5)))
  got = cache.write(jnp.int32(1), new)
  assert got.conv.dtype == jnp.bfloat16 and got.state.dtype == jnp.float32
  assert float(got.state[0].sum()) == 0 and float(got.read(jnp.int32(1)).state.sum()) == 20


def paged(lengths, stack=()):
  """Two rows of at most two pages of four; row 0 lies in pages 2 and 0, row 1 in page 1 only."""
  latent = jnp.full((*stack, 1, 3, 4, 3), -1.0)
  return MlaPages(latent, jnp.int32([[[2, 0], [1, 3]]]), jnp.broadcast_to(jnp.int32(lengths), (*stack, 2)))


def test_pages_take_new_rows_behind_each_row_s_own_end():
  cache = paged([3, 0]).append(tokens(2, 2), jnp.int32([[1, 1], [0, 1]]))
  assert np.asarray(cache.latent[0, ..., 0]).tolist() == [[2, -1, -1, -1], [4, -1, -1, -1], [-1, -1, -1, 1]]
  assert cache.length.tolist() == [5, 1]


def test_a_stack_of_pages_writes_its_own_row_only():
  pool, row = paged([3, 0], stack=(3,)), jnp.int32(1)
  cache = pool.write(row, pool.read(row).append(tokens(2, 2), None))
  assert np.all(cache.latent[jnp.array([0, 2])] == -1)
  assert cache.latent[1, 0, :, :, 0].tolist() == [[2, -1, -1, -1], [3, 4, -1, -1], [-1, -1, -1, 1]]
  assert cache.length.tolist() == [[3, 0], [5, 2], [3, 0]] and cache.row is None
