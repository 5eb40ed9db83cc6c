"""Parameters, tensors and bytes of a model from its configuration alone, by closed formulas.

Letters: D model width, H heads, K key width, N nope width, P tail width, V value width, R latent rank,
E experts, L expert input width, F expert width, W convolution width.
Source: spec section 6; dtypes and names of the published layout: section 3.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from MaxText.configs.schema import Config

_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


class Counts(NamedTuple):
  """Size of the text model.

  Attributes:
    total: parameters; the padding of A_log is none, and a packed expert weight is one.
    active: parameters that one token reads, the head included, the embedding table not.
    tensors: tensors in the published layout.
    bytes_by_dtype: safetensors dtype name -> bytes in the published layout.
    packed_expert_bytes: bytes of MXFP4 experts, values and scales; 0 when experts are stored plain.
    float32: parameters that stay in float32 whatever the dtype.
  """

  total: int
  active: int
  tensors: int
  bytes_by_dtype: dict[str, int]
  packed_expert_bytes: int
  float32: int

  @property
  def stored_bytes(self) -> int:
    """Bytes of all tensors in the published layout."""
    return sum(self.bytes_by_dtype.values())


class Piece(NamedTuple):
  """Tensors of one dtype.

  Attributes:
    tensors: how many.
    parameters: their parameters together.
    dtype: safetensors name.
    stored: elements in the file, where it keeps another number than `parameters`.
    read: parameters that one token reads, where it reads not all of them.
  """

  tensors: int
  parameters: int
  dtype: str = "BF16"
  stored: int | None = None
  read: int | None = None


def count(cfg: Config) -> Counts:
  """Returns the size of the text model that `cfg` describes."""
  pieces = list(_top(cfg))
  for layer in range(cfg.base_num_decoder_layers):
    pieces += _stream(cfg)
    pieces += _kda(cfg) if cfg.layer_kind(layer) == "kda" else _mla(cfg)
    pieces += [_mlp(cfg, cfg.base_mlp_dim)] if cfg.mlp_kind(layer) == "dense" else _moe(cfg)
  stored: Counter[str] = Counter()
  for piece in pieces:
    elements = piece.parameters if piece.stored is None else piece.stored
    stored[piece.dtype] += elements * _BYTES[piece.dtype]
  return Counts(
    total=sum(piece.parameters for piece in pieces),
    active=sum(piece.parameters if piece.read is None else piece.read for piece in pieces),
    tensors=sum(piece.tensors for piece in pieces),
    bytes_by_dtype=dict(stored),
    packed_expert_bytes=stored["U8"],
    float32=sum(piece.parameters for piece in pieces if piece.dtype == "F32"),
  )


def attention_parameters(cfg: Config, kind: str) -> int:
  """Returns the parameters of one attention layer of a kind, "kda" or "mla"."""
  return sum(piece.parameters for piece in (_kda(cfg) if kind == "kda" else _mla(cfg)))


def _top(cfg: Config) -> Iterator[Piece]:
  D, table = cfg.base_emb_dim, cfg.vocab_size * cfg.base_emb_dim
  yield Piece(1, D)
  if cfg.attn_res_block_size is not None:
    yield Piece(2, 2 * D)
  if cfg.logits_via_embedding:
    yield Piece(1, table)
  else:
    yield Piece(2, 2 * table, read=table)


def _stream(cfg: Config) -> Iterator[Piece]:
  """Norms around the two halves of a layer, and the two residual mixes."""
  yield Piece(2, 2 * cfg.base_emb_dim)
  if cfg.attn_res_block_size is not None:
    yield Piece(4, 4 * cfg.base_emb_dim)


def _kda(cfg: Config) -> Iterator[Piece]:
  D, H, K, W = cfg.base_emb_dim, cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size
  low_rank = K * D + H * K * K
  yield Piece(4, 4 * H * K * D)  # query, key, value, out
  yield Piece(1, H * K * D) if cfg.use_full_rank_gate else Piece(2, low_rank)
  yield Piece(3, low_rank + H * D)  # decay, write strength
  yield Piece(3, 3 * H * K * W, "F32")
  # K3 pads A_log to the head width with zeros (spec 3)
  yield Piece(1, H, "F32", stored=max(H, K) if cfg.model_type == "kimi_k3" else H)
  yield Piece(2, H * K + K, "F32")  # dt_bias, o_norm


def _mla(cfg: Config) -> Iterator[Piece]:
  D, H, R = cfg.base_emb_dim, cfg.base_num_query_heads, cfg.kv_lora_rank
  N, P, V = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
  if cfg.q_lora_rank is None:
    yield Piece(1, H * (N + P) * D)
  else:
    yield Piece(3, cfg.q_lora_rank * (D + 1 + H * (N + P)))
  yield Piece(3, (R + P) * D + R + H * (N + V) * R)
  yield Piece(1, D * H * V)
  if cfg.mla_use_output_gate:
    yield Piece(1, H * V * D)


def _mlp(cfg: Config, width: int) -> Piece:
  return Piece(3, 3 * width * cfg.base_emb_dim)


def _moe(cfg: Config) -> Iterator[Piece]:
  D, E, L, F = cfg.base_emb_dim, cfg.num_experts, cfg.expert_input_dim, cfg.base_moe_mlp_dim
  yield Piece(1, E * D)
  yield Piece(1, E, "F32")
  if cfg.routed_expert_hidden_size is not None:
    yield Piece(2, 2 * L * D)
  if cfg.latent_moe_use_norm:
    yield Piece(1, L)
  if cfg.shared_experts:
    yield _mlp(cfg, cfg.shared_experts * F)
  expert = 3 * L * F
  read = cfg.num_experts_per_tok * expert
  if cfg.expert_quantization == "mxfp4":
    yield Piece(6 * E, E * expert, "U8", stored=E * (expert // 2 + expert // 32), read=read)
  else:
    yield Piece(3 * E, E * expert, read=read)
