"""The Kimi decoder: blocks, residual stream, scan over cycles. One class serves Kimi K3 and Kimi-Linear.

Source: spec 2.3 (layer order and residuals), 2.8 (head). What separates the two families is configuration.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config
from MaxText.layers.attention_kda import KimiDeltaAttention
from MaxText.layers.attention_mla import GatedLatentAttention
from MaxText.layers.attn_res import AttnRes, ResidualStream
from MaxText.layers.cache import DecoderCache, KdaCache, LayerCache, MlaCache, Row
from MaxText.layers.embedding import Embedding
from MaxText.layers.latent_moe import ExpertLoad, LatentMoe
from MaxText.layers.mlp import Mlp
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.projection import Projection, project
from MaxText.layers.router import Router, update_router_bias
from MaxText.models.layer_plan import LayerPlan, layer_plan
from MaxText.models.remat import rematerialised
from MaxText.models.sharding import Layout, constrain_cache

# A scan closes over the expert stacks and indexes them by row: of `xs`, every compiler would copy a slice.
_EXPERTS = nnx.PathContains("experts")


class LayerOutput(NamedTuple):
  """What a layer leaves.

  Attributes:
    stream: the residual stream after both additions.
    cache: memory after the last valid token; None when none came in.
    load: of the routed experts; None of a dense layer.
  """

  stream: ResidualStream
  cache: LayerCache | None
  load: ExpertLoad | None


class DecoderLayer(nnx.Module):
  """Attention and feed-forward, each reading a view of the residual stream and adding to it."""

  def __init__(self, cfg: Config, layer: int, *, rngs: nnx.Rngs):
    """Builds 0-based `layer`; its attention and feed-forward kinds come from the configuration."""
    self.cfg = cfg
    norm = lambda: RMSNorm(cfg.base_emb_dim, cfg.normalization_layer_epsilon, cfg.parameter_dtype, rngs=rngs)
    self.input_layernorm, self.post_attention_layernorm = norm(), norm()
    if cfg.attn_res_block_size is not None:
      self.self_attention_res, self.mlp_res = AttnRes(cfg, rngs=rngs), AttnRes(cfg, rngs=rngs)
    linear = cfg.layer_kind(layer) == "kda"
    self.self_attn = KimiDeltaAttention(cfg, rngs=rngs) if linear else GatedLatentAttention(cfg, rngs=rngs)
    if cfg.mlp_kind(layer) == "dense":
      self.mlp = Mlp(cfg, cfg.base_mlp_dim, rngs=rngs)
    else:
      self.block_sparse_moe = LatentMoe(cfg, rngs=rngs)

  def __call__(
    self,
    stream: ResidualStream,
    cache: LayerCache | None,
    segment_ids: Int[Array, "B T"] | None,
    *,
    layer: int | Int[Array, ""],
    row: Row = None,
    layout: Layout | None = None,
  ) -> LayerOutput:
    """Runs one layer.

    Args:
      stream: what the layers before left.
      cache: this layer's memory (a stacked pool with `row`), or None in training.
      segment_ids: [B, T], 0 = padding; None when every token is valid.
      layer: 0-based depth, traced inside a scan.
      row: which layer of stacked weights and pools.
      layout: of the devices, or None for one.
    """
    plain = self.cfg.attn_res_block_size is None
    h = stream.prefix if plain else self.self_attention_res(stream)
    stream = stream.close_block(layer, self.cfg.attn_res_block_size)
    out, cache = self.self_attn(self.input_layernorm(h), cache, segment_ids, row=row)
    stream = stream.add(_by_rows(layout, out))
    h = self.post_attention_layernorm(stream.prefix if plain else self.mlp_res(stream))
    if hasattr(self, "mlp"):
      out, load = self.mlp(h), None
    else:
      out, load = self.block_sparse_moe(h, segment_ids, row=row, place=layout and layout.experts)
    return LayerOutput(stream.add(_by_rows(layout, out)), cache, load)


class KimiDecoder(nnx.Module):
  """Embedding, the stack of layers, output mixture, norm and head.

  Attributes:
    layout: how the decoder lies on many devices, or None for one; static, and set from outside.
  """

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    self.cfg = cfg
    self.layout: Layout | None = None
    self.plan = layer_plan(cfg, scans(cfg))
    build = lambda index: DecoderLayer(cfg, index, rngs=rngs)
    self.embed_tokens = Embedding(cfg, rngs=rngs)
    self.layers = nnx.List([build(i) for i in range(self.plan.start)])
    if self.plan.repeats:
      first = range(self.plan.start, self.plan.start + self.plan.period)
      self.cycles = nnx.List([_stacked_layer(cfg, i, self.plan.repeats, rngs) for i in first])
      self.epilogue = nnx.List([build(i) for i in range(self.plan.scanned_end, len(self.plan.kinds))])
    if cfg.attn_res_block_size is not None:
      self.output_attn_res = AttnRes(cfg, rngs=rngs)
    self.norm = RMSNorm(cfg.base_emb_dim, cfg.normalization_layer_epsilon, cfg.parameter_dtype, rngs=rngs)
    if not cfg.logits_via_embedding:
      self.lm_head = Projection(cfg, cfg.base_emb_dim, cfg.vocab_size, ("vocab", "embed"), rngs=rngs)

  def __call__(
    self,
    ids: Int[Array, "B T"],
    cache: DecoderCache | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T vocab"], DecoderCache | None]:
    """Maps token ids [B, T] to next-token logits [B, T, vocab] float32; arguments as in `hidden`."""
    h, cache = self.hidden(ids, cache, segment_ids)
    return self.logits(h), cache

  def hidden(
    self,
    ids: Int[Array, "B T"],
    cache: DecoderCache | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], DecoderCache | None]:
    """Runs everything but the head: prefill and decoding, and training where no expert load is wanted.

    Args:
      ids: [B, T] token ids; T is static, and T == 1 takes the single-step kernels.
      cache: memory of the tokens before, from `init_cache` or an earlier call; None in training.
      segment_ids: [B, T] document of each token, 0 = padding; None when every token is valid. A cache
        continues the first document of its row; the cache that comes back belongs to the last one.

    Returns:
      [B, T, D] normalised hidden states in the activation dtype, and the cache after the last valid token.
    """
    h, cache, _ = self._forward(ids, cache, segment_ids)
    return h, cache

  def hidden_and_load(
    self, ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
  ) -> tuple[Float[Array, "B T D"], ExpertLoad]:
    """Runs everything but the head in training, for `logits` and `balance_routers`.

    Args:
      ids: [B, T] token ids.
      segment_ids: [B, T] document of each token, 0 = padding; None when every token is valid.

    Returns:
      [B, T, D] normalised hidden states, and the load of each layer that has experts, in the order of
      depth: tokens that chose each expert, [moe_layers, E], and choices dropped, [moe_layers]. Padding counts
      nowhere.
    """
    h, _, loads = self._forward(ids, None, segment_ids)
    none = ExpertLoad(jnp.zeros((0, self.cfg.num_experts), jnp.int32), jnp.zeros(0, jnp.int32))
    return h, jax.tree.map(lambda *layers: jnp.stack(layers), *loads) if loads else none

  def balance_routers(self, counts: Int[Array, "moe_layers E"], rate: float) -> None:
    """Moves the selection bias of every router in place, by `update_router_bias`.

    Args:
      counts: [moe_layers, E] chosen, from `hidden_and_load`, summed over what was seen since the last update.
      rate: size of the step.
    """
    used = 0
    for routers, layers in self._routers():
      bias = routers.e_score_correction_bias
      rows = jnp.stack([counts[layer] for layer in layers])
      bias.set_value(update_router_bias(bias[...], rows.reshape(bias.shape), rate))
      used += len(layers)
    if used != counts.shape[0]:
      raise ValueError(f"counts of {counts.shape[0]} layers for {used} that have experts")

  def _routers(self) -> Iterator[tuple[Router, list[int]]]:
    """Yields each router, or stack of them, and its layers, counted among those that have experts."""
    depths = [depth for depth, (_, mlp) in enumerate(self.plan.kinds) if mlp == "moe"]
    number = {depth: i for i, depth in enumerate(depths)}
    for depth in depths:
      part, index, row = self.plan.location(depth)
      if not row:  # the first row stands for its stack
        layers = [depth + i * self.plan.period for i in range(self.plan.repeats)] if row == 0 else [depth]
        yield getattr(self, part)[index].block_sparse_moe.gate, [number[layer] for layer in layers]

  def _forward(self, ids, cache, segment_ids):
    """Hidden states, the cache after them, and the load of each layer that has experts."""
    x = self.embed_tokens(ids)
    if segment_ids is not None:
      x = jnp.where((segment_ids != 0)[..., None], x, jnp.zeros_like(x))
    stream = ResidualStream.start(self.cfg, _by_rows(self.layout, x))
    stream, head, loads = self._run(self.layers, stream, cache and cache.layers, segment_ids, 0)
    cycles, tail = (), ()
    if self.plan.repeats:
      stream, cycles, more = self._scan_cycles(stream, cache and cache.cycles, segment_ids)
      stream, tail, last = self._run(
        self.epilogue, stream, cache and cache.epilogue, segment_ids, self.plan.scanned_end
      )
      loads = [*loads, *more, *last]
    h = stream.prefix if self.cfg.attn_res_block_size is None else self.output_attn_res(stream)
    if cache is not None:
      cache = constrain_cache(self.layout, DecoderCache(head, cycles, tail))
    return self.norm(h), cache, loads

  def logits(self, h: Float[Array, "*B D"]) -> Float[Array, "*B vocab"]:
    """Projects hidden states [..., D] to logits [..., vocab] float32; no scale, no cap (spec 2.8)."""
    if self.cfg.logits_via_embedding:
      return project(h, self.embed_tokens.embedding[...]).astype(jnp.float32)
    return self.lm_head(h).astype(jnp.float32)

  def init_cache(self, batch: int, capacity: int) -> DecoderCache:
    """Returns an empty cache for `batch` rows of up to `capacity` tokens each."""
    return constrain_cache(self.layout, init_cache(self.cfg, self.plan, batch, capacity))

  def _run(self, layers, stream, caches, segment_ids, start):
    """Unrolled layers from depth `start` on."""
    new, loads = [], []
    for i, layer in enumerate(layers):
      context = dict(segment_ids=segment_ids, layer=start + i, layout=self.layout)
      run = functools.partial(layer, cache=caches and caches[i], **context)
      stream, cache, load = self._for_training(run, caches)(stream)
      new.append(cache)
      loads += [] if load is None else [load]
    return stream, tuple(new), loads

  def _for_training(self, body, caches, *, in_scan=False):
    """Rematerialises `body` where there is a backward pass: without caches."""
    return rematerialised(body, self.cfg.remat_policy, in_scan=in_scan) if caches is None else body

  def _scan_cycles(self, stream, caches, segment_ids):
    """Scans the cycles; the body gets the cycle number, slices of the small weights, and whole expert stacks.

    In training every weight is scanned: the gradient of a closed-over stack has the stack's size each cycle.
    """
    start, period = self.plan.start, self.plan.period
    closed_over = nnx.Nothing() if caches is None else _EXPERTS
    graphs, experts, small = zip(*(nnx.split(layer, closed_over, ...) for layer in self.cycles))
    # a traced count from here on; the buffer already has room for every block
    stream = dataclasses.replace(stream, closed=jnp.int32(stream.closed))

    def cycle(carry, xs):
      stream, caches = carry
      row, weights = xs
      new, loads = [], []
      for position in range(period):
        layer = nnx.merge(graphs[position], experts[position], weights[position])
        cache = caches and caches[position]
        depth = start + row * period + position
        stack_row = None if caches is None else row
        place = dict(layer=depth, row=stack_row, layout=self.layout)
        stream, cache, load = layer(stream, cache, segment_ids, **place)
        new.append(cache)
        loads += [] if load is None else [load]
      return (stream, caches and tuple(new)), loads if caches is None else []

    body = self._for_training(cycle, caches, in_scan=True)
    (stream, caches), loads = jax.lax.scan(body, (stream, caches), (jnp.arange(self.plan.repeats), small))
    if self.cfg.attn_res_block_size is not None:
      closed = -(-self.plan.scanned_end // self.cfg.attn_res_block_size)
      stream = dataclasses.replace(stream, closed=closed)
    rows = [ExpertLoad(chosen[i], dropped[i]) for i in range(self.plan.repeats) for chosen, dropped in loads]
    return stream, caches, rows


def _by_rows(layout: Layout | None, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
  """Splits what enters the residual stream by rows: here the partial sums of a sub-layer are added up."""
  return x if layout is None else layout.constrain(x, "activation_batch", None, None)


def scans(cfg: Config) -> bool:
  """Whether the depth is scanned; `auto` unrolls on CPU, where a scan copies the stacked weights."""
  return jax.default_backend() != "cpu" if cfg.scan_layers == "auto" else cfg.scan_layers


def init_cache(cfg: Config, plan: LayerPlan, batch: int, capacity: int) -> DecoderCache:
  """Returns an empty cache in the shape of `plan`: KDA state in float32, the rest in the activation dtype."""
  H, K, W = cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size

  def empty(layer: int, stack: tuple[int, ...]) -> LayerCache:
    if plan.kinds[layer][0] == "mla":
      latent = jnp.zeros((*stack, batch, capacity, cfg.latent_width), cfg.dtype)
      return MlaCache(latent, jnp.zeros((*stack, batch), jnp.int32))
    conv = jnp.zeros((*stack, batch, W - 1, 3, H * K), cfg.dtype)
    return KdaCache(conv, jnp.zeros((*stack, batch, H, K, K), jnp.float32))

  depth = len(plan.kinds)
  cycle = range(plan.start, plan.start + plan.period) if plan.repeats else ()
  return DecoderCache(
    layers=tuple(empty(i, ()) for i in range(plan.start)),
    cycles=tuple(empty(i, (plan.repeats,)) for i in cycle),
    epilogue=tuple(empty(i, ()) for i in range(plan.scanned_end, depth)),
  )


def _stacked_layer(cfg: Config, layer: int, repeats: int, rngs: nnx.Rngs) -> DecoderLayer:
  """Draws `repeats` layers of one kind with a leading stack axis on every leaf."""
  graph, _ = nnx.split(nnx.eval_shape(lambda: DecoderLayer(cfg, layer, rngs=nnx.Rngs(0))))
  keys = jax.random.split(rngs.params(), repeats)
  state = jax.vmap(lambda key: nnx.state(DecoderLayer(cfg, layer, rngs=nnx.Rngs(key))))(keys)
  stacked = nnx.merge(graph, state)
  for _, variable in nnx.iter_graph(stacked):
    if isinstance(variable, nnx.Param | params.Frozen):
      variable.set_metadata(axes=("layers", *variable.get_metadata("axes")))
  return stacked
