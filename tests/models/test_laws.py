"""Laws of the whole decoder: what may not change its answers. One compiled program serves many examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.conftest import load

T, VOCAB = 20, 61
CLOSE = dict(atol=1e-4, rtol=0)  # ADR 0004: logits of about 10, each up to 4.7e-5 from their float64 values
EXAMPLES = settings(max_examples=6, deadline=None)


def ids(seed: int, n: int = T) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def row(tokens, offset: int = 0, width: int = T, segment: int = 1, padding: int = 7):
  """One padded row: ids and segment ids, each [1, width]; padding carries an arbitrary id."""
  out, segments = np.full((1, width), padding, np.int32), np.zeros((1, width), np.int32)
  out[0, offset : offset + len(tokens)] = tokens
  segments[0, offset : offset + len(tokens)] = segment
  return out, segments


class Compiled:
  """A decoder as three programs: forward, cached call, and gradient of a masked loss."""

  def __init__(self, model):
    graph, self.params = nnx.split(model, nnx.Param, ...)[0], nnx.split(model, nnx.Param, ...)[1:]
    merge = lambda params: nnx.merge(graph, *params)
    self.empty = model.init_cache(1, T)
    self.forward = jax.jit(lambda i, s: merge(self.params)(i, None, s)[0])
    self.cached = jax.jit(lambda i, c, s: merge(self.params)(i, c, s))

    def loss(param, rest, i, s):
      """Sum over tokens, so that separate documents add up to the packed row."""
      logits = merge((param, rest))(i, None, s)[0]
      picked = jnp.take_along_axis(jax.nn.log_softmax(logits), i[..., None], axis=-1)[..., 0]
      return -jnp.sum(jnp.where(s != 0, picked, 0.0))

    self.gradient = jax.jit(jax.grad(loss))

  def grads(self, i, s):
    return self.gradient(*self.params, i, s)


@pytest.fixture(scope="module")
def programs(k3, kimi_linear):
  return {"k3": Compiled(k3), "kimi_linear": Compiled(kimi_linear)}


@pytest.fixture(scope="module")
def trained(k3_plain):
  return Compiled(k3_plain)


def assert_trees_close(got, want, scale=1e-4):
  """Every leaf within `scale` of its own largest magnitude."""
  for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want)):
    bound = scale * max(float(jnp.abs(b).max()), 1e-3)
    assert float(jnp.abs(a - b).max()) <= bound, jax.tree_util.keystr(path)


@pytest.mark.parametrize("family", ["k3", pytest.param("kimi_linear", marks=pytest.mark.slow)])
@EXAMPLES
@given(cut=st.integers(1, T - 1), seed=st.integers(0, 99))
def test_any_split_equals_one_shot(programs, family, cut, seed):
  run, tokens = programs[family], ids(seed)
  want = run.forward(*row(tokens))[0]
  head, cache = run.cached(row(tokens[:cut])[0], run.empty, row(tokens[:cut])[1])
  tail, _ = run.cached(row(tokens[cut:])[0], cache, row(tokens[cut:])[1])
  np.testing.assert_allclose(np.concatenate([head[0, :cut], tail[0, : T - cut]]), want, **CLOSE)


@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
@EXAMPLES
@given(offset=st.integers(0, T - 9), seed=st.integers(0, 99))
def test_padding_left_right_and_both_changes_nothing(programs, family, offset, seed):
  run, tokens = programs[family], ids(seed, 9)
  want, want_cache = run.cached(*_interleave(row(tokens), run.empty))
  got, got_cache = run.cached(*_interleave(row(tokens, offset), run.empty))
  np.testing.assert_allclose(got[0, offset : offset + 9], want[0, :9], **CLOSE)
  for a, b in zip(jax.tree.leaves(got_cache), jax.tree.leaves(want_cache)):
    np.testing.assert_allclose(a, b, **CLOSE)
  # rounding cannot hide a leak here: other ids in the padding leave every bit of what matters alone
  other, other_cache = run.cached(*_interleave(row(tokens, offset, padding=23), run.empty))
  np.testing.assert_array_equal(other[0, offset : offset + 9], got[0, offset : offset + 9])
  jax.tree.map(np.testing.assert_array_equal, other_cache, got_cache)


def _interleave(pair, cache):
  return pair[0], cache, pair[1]


def test_padding_inside_a_document_is_skipped(programs):
  run, tokens = programs["k3"], ids(5, 9)
  want = run.forward(*row(tokens))[0, :9]
  i, s = row(tokens)
  keep = np.sort(np.random.default_rng(1).permutation(T)[:9])
  spread, segments = np.full_like(i, 3), np.zeros_like(s)
  spread[0, keep], segments[0, keep] = tokens, 1
  np.testing.assert_allclose(run.forward(spread, segments)[0, keep], want, **CLOSE)


@pytest.mark.parametrize("offset", [0, 5, T - 9])
def test_padding_leaves_every_gradient_alone(trained, offset):
  tokens = ids(6, 9)
  assert_trees_close(trained.grads(*row(tokens, offset)), _unpadded_gradient(trained))


@functools.cache
def _unpadded_gradient(trained):
  return trained.grads(*row(ids(6, 9), 2))


PACKINGS = [(1, 2, 3, 14), (7, 1, 1, 11), (3, 3, 3, 3), (20,)]


def packed(lengths, seed):
  """Documents of the given lengths in one row, and each alone in a row of its own."""
  documents = [ids(seed + n, length) for n, length in enumerate(lengths)]
  tokens = np.concatenate(documents)
  segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  i, s = row(tokens)
  s[0, : len(tokens)] = segments
  return (i, s), [row(document) for document in documents]


@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
def test_packed_documents_equal_separate_ones(programs, family, lengths):
  run = programs[family]
  together, alone = packed(lengths, seed=10)
  got = run.forward(*together)[0]
  want = np.concatenate([run.forward(*one)[0, :n] for one, n in zip(alone, lengths)])
  np.testing.assert_allclose(got[: sum(lengths)], want, **CLOSE)


@pytest.mark.parametrize("lengths", PACKINGS[:2], ids=str)
def test_packed_gradients_equal_the_sum_of_separate_ones(trained, lengths):
  together, alone = packed(lengths, seed=20)
  want = jax.tree.map(lambda *parts: sum(parts), *(trained.grads(*one) for one in alone))
  assert_trees_close(trained.grads(*together), want)


def test_the_cache_after_packed_documents_belongs_to_the_last_one(programs):
  run = programs["k3"]
  together, alone = packed((6, 8), seed=30)
  _, got = run.cached(*_interleave(together, run.empty))
  _, want = run.cached(*_interleave(alone[1], run.empty))
  probe = row(ids(31, 3))
  logits = [run.cached(*_interleave(probe, cache))[0][0, :3] for cache in (got, want)]
  np.testing.assert_allclose(*logits, **CLOSE)


def test_a_batch_row_equals_the_row_alone(k3, programs):
  lengths = (20, 1, 9, 4)
  rows = [row(ids(40 + n, n), offset) for n, offset in zip(lengths, (0, 3, 11, 16))]
  i, s = (np.concatenate(part) for part in zip(*rows))
  together = jax.jit(lambda i, s: k3(i, None, s)[0])(i, s)
  for b, one in enumerate(rows):
    valid = s[b] != 0
    np.testing.assert_allclose(together[b][valid], programs["k3"].forward(*one)[0][valid], **CLOSE)


def test_a_row_of_padding_keeps_its_cache_bit_for_bit(programs):
  run = programs["k3"]
  _, cache = run.cached(*_interleave(row(ids(50, 11)), run.empty))
  _, after = run.cached(*_interleave(row([]), cache))
  for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(cache)):
    np.testing.assert_array_equal(a, b)


def test_scan_equals_unrolled_with_and_without_cache(k3_directory, k3, programs):
  scanned = load(k3_directory, scan_layers=True)
  assert scanned.plan.repeats == 2 and k3.plan.repeats == 0
  run, tokens = Compiled(scanned), ids(60)
  np.testing.assert_allclose(run.forward(*row(tokens)), programs["k3"].forward(*row(tokens)), **CLOSE)
  got, cache = run.cached(*_interleave(row(tokens[:12]), run.empty))
  tail, _ = run.cached(*_interleave(row(tokens[12:]), cache))
  want = programs["k3"].forward(*row(tokens))[0]
  np.testing.assert_allclose(np.concatenate([got[0, :12], tail[0, :8]]), want, **CLOSE)


PADDED = packed((9, 8), seed=70)[0]


@pytest.fixture(scope="module")
def reference_gradients(k3_plain_directory):
  kernels = ("kda_impl", "mla_impl", "moe_impl", "short_conv_impl")
  slow = load(k3_plain_directory, **dict.fromkeys(kernels, "reference"))
  return dict(nnx.to_flat_state(Compiled(slow).grads(*PADDED)))


def assert_within_a_ten_thousandth(got, want, name):
  """Of the largest value of the leaf, with no floor: a leaf without gradient has none in both."""
  assert float(jnp.abs(got - want).max()) <= 1e-4 * float(jnp.abs(want).max()), name


def test_fast_kernels_have_the_gradients_of_the_reference_kernels(trained, reference_gradients):
  got = nnx.to_flat_state(trained.grads(*PADDED))
  assert len(got) == len(reference_gradients)
  for path, gradient in got:
    assert_within_a_ten_thousandth(gradient[...], reference_gradients[path][...], path)


def test_scanned_and_rematerialised_layers_have_the_gradients_of_the_reference_kernels(
  k3_plain_directory, reference_gradients
):
  scanned = load(k3_plain_directory, scan_layers=True, remat_policy="full")
  plan, seen = scanned.plan, 0
  assert plan.repeats == 2
  got = dict(nnx.to_flat_state(Compiled(scanned).grads(*PADDED)))
  for path, want in reference_gradients.items():
    part, at, rest = path[0], None, path[1:]
    if part == "layers":
      part, index, at = plan.location(path[1])
      rest = (index, *path[2:])
    gradient = got[(part, *rest)][...]
    assert_within_a_ten_thousandth(gradient if at is None else gradient[at], want[...], path)
    seen += 1 if at is None else 1 / plan.repeats
  assert seen == len(got)
