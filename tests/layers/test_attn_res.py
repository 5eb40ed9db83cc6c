"""The residual stream: which sources a mix sees, when a block closes, and what the mixture is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.attn_res import AttnRes, ResidualStream
from tests.op_fixtures import assert_op_close, load_fixture
from tests.small import k3_config


def mixer(cfg, norm=None, proj=None):
  res = AttnRes(cfg, rngs=nnx.Rngs(0))
  if norm is not None:
    res.norm.scale.set_value(jnp.asarray(norm))
    res.proj.set_value(jnp.asarray(proj))
  return res


def reference_mix(sources, weight, eps):
  """Spec 2.3 in float64: score the normed sources, mix the raw ones."""
  sources = np.asarray(sources, np.float64)
  scores = (sources * weight).sum(-1) / np.sqrt((sources**2).mean(-1) + eps)
  share = np.exp(scores - scores.max(0))
  return ((share / share.sum(0))[..., None] * sources).sum(0)


@pytest.mark.parametrize("n_blocks", range(9))
def test_mix_equals_the_definition_for_every_number_of_sources(n_blocks):
  cfg = k3_config(base_emb_dim=16, attn_res_block_size=1, base_num_decoder_layers=9)
  rng = np.random.default_rng(n_blocks)
  norm, proj = 1 + 0.3 * rng.standard_normal(16), rng.standard_normal(16)
  values = rng.standard_normal((10, 2, 3, 16)).astype(np.float32) * rng.uniform(0.1, 5, (10, 2, 3, 1)).astype(
    "f4"
  )
  res = mixer(cfg, norm, proj)
  blocks = jnp.zeros((9, 2, 3, 16)).at[:n_blocks].set(values[:n_blocks])
  want = reference_mix([*values[:n_blocks], values[9]], norm * proj, cfg.normalization_layer_epsilon)
  static = res(ResidualStream(jnp.asarray(values[9]), blocks, n_blocks))
  traced = jax.jit(lambda n: res(ResidualStream(jnp.asarray(values[9]), blocks, n)))(jnp.int32(n_blocks))
  np.testing.assert_allclose(static, want, atol=1e-5)
  np.testing.assert_allclose(traced, want, atol=1e-5)


def test_mix_fixture():
  data = load_fixture("attnres")
  cfg = k3_config(base_emb_dim=128, attn_res_block_size=1, base_num_decoder_layers=8)
  res = mixer(cfg, data["norm_weight"], data["proj_weight"])
  blocks = jnp.asarray(data["block_residual"]).transpose(1, 0, 2)[:, None]
  out = res(ResidualStream(jnp.asarray(data["prefix_sum"])[None], blocks, 8))
  assert_op_close(out[0], data["out"])


def test_zero_query_is_the_plain_mean():
  cfg = k3_config(base_emb_dim=8, attn_res_block_size=1, base_num_decoder_layers=2)
  values = jax.random.normal(jax.random.key(0), (3, 1, 1, 8))
  out = mixer(cfg)(ResidualStream(values[2], values[:2], 2))
  np.testing.assert_allclose(out, values.mean(0), rtol=1e-6, atol=1e-7)


def sources_seen(depth, block, *, traced):
  """Sources of (pre-attention, pre-feed-forward) mix of each layer, with every sub-layer adding one."""
  cfg = k3_config(base_emb_dim=4, attn_res_block_size=block, base_num_decoder_layers=depth)
  stream = ResidualStream.start(cfg, jnp.full((1, 1, 4), 100.0))
  if traced:
    stream = dataclasses.replace(stream, closed=jnp.int32(0))
  seen = []
  for layer in range(depth):
    before = int(stream.closed) + 1
    stream = stream.close_block(jnp.int32(layer) if traced else layer, block).add(jnp.ones((1, 1, 4)))
    seen.append((before, int(stream.closed) + 1))
    stream = stream.add(jnp.ones((1, 1, 4)))
  return seen, stream


@pytest.mark.parametrize("traced", [False, True], ids=["unrolled", "traced"])
def test_number_of_sources_follows_the_published_counts(traced):
  for depth, block in ((5, 2), (93, 12)):
    seen, stream = sources_seen(depth, block, traced=traced)
    assert seen == [(-(-l // block) + 1, l // block + 2) for l in range(depth)]
    assert int(stream.closed) == -(-depth // block) == stream.blocks.shape[0]


@pytest.mark.parametrize("traced", [False, True], ids=["unrolled", "traced"])
def test_blocks_hold_the_embedding_and_then_sums_of_whole_blocks(traced):
  _, stream = sources_seen(5, 2, traced=traced)
  # embedding, two full blocks of 2 layers x 2 sub-layers; the last layer stays in the prefix
  assert stream.blocks[:, 0, 0, 0].tolist() == [100.0, 4.0, 4.0]
  assert stream.prefix[0, 0].tolist() == [2.0] * 4


def test_plain_residual_has_no_blocks():
  cfg = k3_config(base_emb_dim=4, attn_res_block_size=None)
  stream = ResidualStream.start(cfg, jnp.ones((1, 1, 4)))
  assert stream.blocks is None
  assert stream.close_block(0, None).add(jnp.ones((1, 1, 4))).prefix[0, 0].tolist() == [2.0] * 4
