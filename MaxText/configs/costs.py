"""What one pass of a model has to compute and to move, from its configuration alone, by closed formulas.

FLOPs are those of products, two for each multiplication with its addition; norms, activations and softmax are
left out. Bytes are those of weights and memory, each read once; activations are left out, as they need not
leave the chip. Routed experts count as far as the tokens can choose them: that is what the formula of a dense
model (2 x parameters, all bytes) gets wrong here.

Letters: D model width, H heads, K key width, N nope width, P tail width, V value width, R latent rank,
E experts, A experts per token, L expert input width, F expert width, W convolution width.
Source: spec 2.4 (KDA), 2.5 (MLA, both forms), 2.7 (experts).
"""

from typing import NamedTuple

from MaxText.configs import counts
from MaxText.configs.schema import Config

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MXFP4_BYTES = 17 / 32  # of one value: half a byte and its share of a scale


class Flops(NamedTuple):
  """Floating-point operations of one pass.

  Attributes:
    matrices: products with the matrices that every token meets, the head and the expansion of latents apart.
    experts: products with the routed experts, A for each token.
    recurrence: the delta rule and the short convolutions of linear attention, the same for every token.
    attention: scores and mixtures of full attention, and the expansion of latents; they grow with context.
    head: logits.
  """

  matrices: int
  experts: int
  recurrence: int
  attention: int
  head: int

  @property
  def total(self) -> int:
    """All of them."""
    return sum(self)


class Bytes(NamedTuple):
  """Bytes that one pass reads and writes.

  Attributes:
    weights: every parameter but routed experts and the table of embeddings, and the rows that it looks up;
      the head only where logits are computed.
    experts: routed experts that the tokens can choose, as they lie in memory.
    state: recurrent state and convolution windows of linear attention, read and written.
    latents: cache rows of full attention, read for the tokens before and written for the new ones.
  """

  weights: int
  experts: int
  state: int
  latents: int

  @property
  def total(self) -> int:
    """All of them."""
    return sum(self)


def pass_flops(cfg: Config, rows: int, tokens: int, context: int, logits: int) -> Flops:
  """Returns the FLOPs of one pass.

  Full attention counts in the cheaper of its two forms: expanding keys and values of all tokens at hand, or
  scoring on the latents themselves. Linear attention counts as the recurrence; its chunked form does more.

  Args:
    cfg: the model.
    rows: sequences side by side.
    tokens: new tokens of each.
    context: tokens of each that were read before.
    logits: tokens, over all rows, whose logits are computed.
  """
  D, H, K = cfg.base_emb_dim, cfg.kda_num_heads, cfg.kda_head_dim
  new, full, moe = rows * tokens, len(cfg.full_attn_layers), moe_layers(cfg)
  linear = _linear_layers(cfg)
  shared = 3 * cfg.shared_experts * cfg.base_moe_mlp_dim * D
  latent = 0 if cfg.routed_expert_hidden_size is None else 2 * cfg.expert_input_dim * D
  matrices = linear * _kda_matrices(cfg) + full * _mla_matrices(cfg)
  matrices += moe * (cfg.num_experts * D + latent + shared)
  matrices += (cfg.base_num_decoder_layers - moe) * 3 * cfg.base_mlp_dim * D
  # of each head: two reads of the memory, its decay, and an update that multiplies and adds
  recurrence = 7 * H * K * K + 2 * 3 * H * K * cfg.short_conv_kernel_size
  return Flops(
    matrices=2 * new * matrices,
    experts=2 * new * moe * cfg.num_experts_per_tok * expert_parameters(cfg),
    recurrence=new * linear * recurrence,
    attention=rows * full * _attention_flops(cfg, tokens, context),
    head=2 * logits * cfg.vocab_size * D,
  )


def pass_bytes(cfg: Config, rows: int, tokens: int, context: int, logits: int) -> Bytes:
  """Returns the bytes of one pass; arguments as `pass_flops`."""
  size, item = counts.count(cfg), ITEM_BYTES[cfg.parameter_dtype]
  moe, expert = moe_layers(cfg), expert_parameters(cfg)
  table = cfg.vocab_size * cfg.base_emb_dim
  unread = table * ((not cfg.logits_via_embedding) + (not logits))  # the table of embeddings; the head
  plain = size.total - size.float32 - moe * cfg.num_experts * expert - unread
  looked_up = rows * tokens * cfg.base_emb_dim
  reached = reached_experts(cfg, rows * tokens)
  return Bytes(
    weights=size.float32 * ITEM_BYTES["float32"] + (plain + looked_up) * item,
    experts=int(moe * reached * expert * (MXFP4_BYTES if cfg.packs_experts else item)),
    state=2 * rows * state_bytes(cfg),
    latents=rows * (context + tokens) * latent_bytes(cfg),
  )


def state_bytes(cfg: Config) -> int:
  """Returns the bytes of one slot's memory in all linear layers: it does not grow with the context."""
  return _state_values(cfg) * ITEM_BYTES["float32"] + _window_values(cfg) * ITEM_BYTES[cfg.dtype]


def state_values(cfg: Config) -> int:
  """Returns the numbers that one slot remembers in all linear layers."""
  return _state_values(cfg) + _window_values(cfg)


def latent_bytes(cfg: Config) -> int:
  """Returns the bytes that one token leaves in all full-attention layers."""
  return latent_values(cfg) * ITEM_BYTES[cfg.dtype]


def latent_values(cfg: Config) -> int:
  """Returns the numbers that one token leaves in all full-attention layers."""
  return len(cfg.full_attn_layers) * cfg.latent_width


def attention_kinds(cfg: Config) -> list[str]:
  """Returns the kinds of attention that the model has, "kda" and "mla"."""
  return sorted({cfg.layer_kind(layer) for layer in range(cfg.base_num_decoder_layers)})


def layer_memory_bytes(cfg: Config, kind: str) -> int:
  """Returns what one attention layer holds: "kda" of a slot, "mla" of a token."""
  if kind == "mla":
    return latent_bytes(cfg) // len(cfg.full_attn_layers)
  return state_bytes(cfg) // _linear_layers(cfg)


def moe_layers(cfg: Config) -> int:
  """Returns how many layers have routed experts."""
  return sum(cfg.mlp_kind(layer) == "moe" for layer in range(cfg.base_num_decoder_layers))


def reached_experts(cfg: Config, tokens: int) -> int:
  """Returns the most experts of one layer that so many tokens can choose together."""
  return min(cfg.num_experts, tokens * cfg.num_experts_per_tok)


def expert_parameters(cfg: Config) -> int:
  """Returns the parameters of one routed expert: gate, up and down."""
  return 3 * cfg.expert_input_dim * cfg.base_moe_mlp_dim


def _state_values(cfg: Config) -> int:
  return _linear_layers(cfg) * cfg.kda_num_heads * cfg.kda_head_dim**2


def _window_values(cfg: Config) -> int:
  channels = 3 * cfg.kda_num_heads * cfg.kda_head_dim
  return _linear_layers(cfg) * (cfg.short_conv_kernel_size - 1) * channels


def _linear_layers(cfg: Config) -> int:
  return cfg.base_num_decoder_layers - len(cfg.full_attn_layers)


def _kda_matrices(cfg: Config) -> int:
  D, H, K = cfg.base_emb_dim, cfg.kda_num_heads, cfg.kda_head_dim
  low_rank = K * D + H * K * K
  gate = H * K * D if cfg.use_full_rank_gate else low_rank
  return 4 * H * K * D + gate + low_rank + H * D  # q, k, v, out; output gate; decay; write strength


def _mla_matrices(cfg: Config) -> int:
  """Without the expansion of latents, whose products are those of the form of attention."""
  D, H = cfg.base_emb_dim, cfg.base_num_query_heads
  N, P, V = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
  wide = H * (N + P)
  queries = wide * D if cfg.q_lora_rank is None else cfg.q_lora_rank * (D + wide)
  return queries + cfg.latent_width * D + H * V * D * (2 if cfg.mla_use_output_gate else 1)


def _attention_flops(cfg: Config, tokens: int, context: int) -> int:
  """Of one row in one layer: each token meets the context and the new tokens up to itself."""
  H, R = cfg.base_num_query_heads, cfg.kv_lora_rank
  N, P, V = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
  pairs = tokens * context + tokens * (tokens + 1) // 2
  expansion = H * (N + V) * R  # of one latent into keys and values, or of one query and one mixture
  direct = (tokens + context) * expansion + pairs * H * (N + P + V)
  absorbed = tokens * expansion + pairs * H * (R + P + R)
  return 2 * min(direct, absorbed)
