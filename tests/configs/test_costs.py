"""FLOPs and bytes of a pass: by hand, against the parameters of a model, and against XLA's own count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.configs import costs, counts
from MaxText.configs.loader import load
from MaxText.layers.attention_kda import KimiDeltaAttention
from MaxText.layers.attention_mla import GatedLatentAttention
from MaxText.layers.cache import KdaCache, MlaCache
from MaxText.models import registry
from tests.small import k3_config, kimi_linear_config

CONFIGS = {
  "k3": k3_config(),
  "k3-packed-bfloat16": k3_config(expert_quantization="mxfp4", dtype="bfloat16"),
  "k3-dequantized": k3_config(expert_quantization="mxfp4", expert_weights="dequantized"),
  "kimi-linear": kimi_linear_config(weight_dtype="bfloat16"),
}


def test_a_decode_step_of_the_tiny_model_by_hand():
  """kimi-k3-tiny: D 144, 9 layers (6 linear, 3 full), 8 with 16 experts of which 4 are chosen."""
  cfg = load("kimi-k3-tiny")
  kda = 4 * 128 * 144 + 128 * 144 + (32 * 144 + 128 * 32) + 4 * 144
  mla = 80 * (144 + 4 * 48) + 80 * 144 + 2 * 4 * 48 * 144
  moe = 16 * 144 + 2 * 64 * 144 + 3 * 2 * 32 * 144
  expert = 3 * 64 * 32
  flops = costs.pass_flops(cfg, rows=3, tokens=1, context=10, logits=3)
  assert flops.matrices == 2 * 3 * (6 * kda + 3 * mla + 8 * moe + 3 * 288 * 144)
  assert flops.experts == 2 * 3 * 8 * 4 * expert
  assert flops.recurrence == 3 * 6 * (7 * 4 * 32 * 32 + 2 * 3 * 128 * 4)
  # on the latents: lift and lower with [32 + 48, 64] a head, 11 tokens of 64 + 16 scored and of 64 mixed
  assert flops.attention == 2 * 3 * 3 * 4 * (80 * 64 + 11 * (80 + 64))
  assert flops.head == 2 * 3 * 1024 * 144
  moved = costs.pass_bytes(cfg, rows=3, tokens=1, context=10, logits=3)
  assert moved.experts == 8 * 12 * expert * 17 // 32  # 3 rows x 4 experts, 4.25 bits a weight
  assert moved.state == 2 * 3 * 6 * 4 * (4 * 32 * 32 + 3 * 3 * 128)
  assert moved.latents == 3 * 11 * 3 * (64 + 16) * 4


def test_a_prompt_takes_the_cheaper_form_and_half_a_square():
  cfg = load("kimi-k3-tiny")
  flops = costs.pass_flops(cfg, rows=1, tokens=512, context=0, logits=1)
  pairs = 512 * 513 // 2
  assert flops.attention == 2 * 3 * 4 * (512 * 80 * 64 + pairs * (32 + 16 + 48))
  assert flops.head == 2 * 1024 * 144


def test_a_prompt_in_chunks_scores_as_many_pairs():
  """The chunks differ from one pass by the expansion of the latents before them, and by nothing else."""
  cfg = load("kimi-k3-tiny")
  whole = costs.pass_flops(cfg, 1, 512, 0, 1).attention
  chunks = [costs.pass_flops(cfg, 1, 256, start, 1).attention for start in (0, 256)]
  assert sum(chunks) - whole == 2 * 3 * 4 * 256 * 80 * 64


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_prompt_in_chunks_reads_the_head_once(is_tied):
  """Without logits a pass reads of the two tables the rows of its tokens, and nothing else."""
  cfg = k3_config().model_copy(update={"logits_via_embedding": is_tied})
  D, item = cfg.base_emb_dim, 4
  table = cfg.vocab_size * D * item
  first, last = (costs.pass_bytes(cfg, 1, 16, start, logits) for start, logits in ((0, 0), (16, 1)))
  assert last.weights - first.weights == table
  assert first._replace(weights=0, latents=0) == last._replace(weights=0, latents=0)
  size = counts.count(cfg)
  rest = size.total * item - costs.moe_layers(cfg) * cfg.num_experts * costs.expert_parameters(cfg) * item
  assert first.weights == rest - (1 if is_tied else 2) * table + 16 * D * item


def test_published_models_keep_their_state_and_grow_by_their_latents():
  k3, linear = load("kimi-k3", ["dtype=bfloat16"]), load("kimi-linear-48b-a3b", ["dtype=bfloat16"])
  # 69 linear layers of 96 heads, float32 states of 128 x 128 and three taps of q, k and v in bfloat16
  assert costs.state_bytes(k3) == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
  assert costs.latent_bytes(k3) == 24 * 576 * 2
  # the figures of docs/performance.md
  assert (round(costs.state_bytes(k3) / 1e6), costs.latent_bytes(k3)) == (449, 27_648)
  assert costs.latent_bytes(linear) == 7 * 576 * 2


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_bytes_of_a_full_batch_are_those_of_the_parameters(cfg):
  """Enough rows reach every expert; of the table of embeddings each row reads its own line."""
  leaves = dict(nnx.to_flat_state(nnx.state(registry.abstract(cfg))))
  size = lambda path: int(np.prod(leaves[path].shape)) * leaves[path].dtype.itemsize
  experts = sum(size(path) for path in leaves if "experts" in path)
  table = sum(size(path) for path in leaves if "embed_tokens" in path)
  rest = sum(map(size, leaves)) - experts - table
  moved = costs.pass_bytes(cfg, rows=cfg.num_experts, tokens=1, context=0, logits=cfg.num_experts)
  assert moved.experts == experts
  assert moved.weights == rest + cfg.num_experts * table // cfg.vocab_size


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_matrices_are_the_active_parameters_without_vectors(cfg):
  """What a token reads by `counts`, less norms, biases and taps, less the expansion that attention counts."""
  leaves = nnx.to_flat_state(nnx.state(registry.abstract(cfg)))
  vectors = sum(
    int(np.prod(leaf.shape))
    for path, leaf in leaves
    if len(leaf.shape) == 1 or "qkv_conv1d" in path or "dt_bias" in path
  )
  expansion = sum(int(np.prod(leaf.shape)) for path, leaf in leaves if {"k_up", "v_up"} & set(path))
  flops = costs.pass_flops(cfg, rows=1, tokens=1, context=0, logits=1)
  active = counts.count(cfg).active - vectors - expansion
  assert flops.matrices + flops.experts + flops.head == 2 * active


def test_linear_attention_is_flat_and_full_attention_linear_in_the_context():
  cfg = load("kimi-k3-tiny")
  moved = [costs.pass_bytes(cfg, 4, 1, context, 4) for context in (99, 199, 299)]
  assert len({(each.weights, each.experts, each.state) for each in moved}) == 1
  assert moved[1].latents - moved[0].latents == moved[2].latents - moved[1].latents == 4 * 100 * 960
  flops = [costs.pass_flops(cfg, 4, 1, context, 4) for context in (99, 199, 299)]
  assert len({each.recurrence for each in flops}) == 1
  assert flops[1].attention - flops[0].attention == flops[2].attention - flops[1].attention > 0


@pytest.mark.parametrize("rows, reached", [(1, 2), (3, 6), (4, 8), (100, 8)])
def test_a_batch_reaches_as_many_experts_as_there_are_at_most(rows, reached):
  assert costs.reached_experts(k3_config(), rows) == reached  # 2 of 8 a token


def counted(layer, cache, cfg, rows):
  """XLA's count for one token of every row."""
  graph, params = nnx.split(layer)
  x = jax.ShapeDtypeStruct((rows, 1, cfg.base_emb_dim), jnp.float32)
  program = jax.jit(lambda p, x, cache: nnx.merge(graph, p)(x, cache))
  return program.lower(params, x, cache).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_xla_counts_the_same_products(kind):
  """XLA counts norms, gates and softmax, too: in a layer this wide, a few in a hundred."""
  cfg = k3_config({"hidden_size": 512, "q_lora_rank": 64, "kda_head_dim": 32})
  rows, context, f32 = 4, 255, jnp.float32
  build = KimiDeltaAttention if kind == "kda" else GatedLatentAttention
  layer = nnx.eval_shape(lambda: build(cfg, rngs=nnx.Rngs(0)))
  one = {
    "kda": cfg.model_copy(update={"full_attn_layers": (), "base_num_decoder_layers": 1}),
    "mla": cfg.model_copy(update={"full_attn_layers": (1,), "base_num_decoder_layers": 1}),
  }[kind].model_copy(update={"first_num_dense_layers": 1, "base_mlp_dim": 0})
  H, K, W = cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size
  shape = jax.ShapeDtypeStruct
  if kind == "kda":
    cache = KdaCache(shape((rows, W - 1, 3, H * K), f32), shape((rows, H, K, K), f32))
  else:
    # every slot of the cache is scored, held or not
    latent = shape((rows, context, cfg.latent_width), f32)
    cache = MlaCache(latent, shape((rows,), jnp.int32))
  flops = costs.pass_flops(one, rows, 1, context, logits=0)
  assert flops.total <= counted(layer, cache, cfg, rows) <= 1.1 * flops.total
