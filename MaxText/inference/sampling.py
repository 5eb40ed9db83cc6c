"""Picks the next token of every row: greedy, temperature, top-k and top-p, all as traced arrays.

Every setting is an array with one entry a row, so that no change of a setting compiles anything and
rows of one batch may differ. A row's answer depends on its own logits, settings, seed and token position
only, never on the rows beside it.

Dims: B rows, V vocabulary.
Source: the inverse of Gumbel noise, argmax(logits + gumbel) ~ softmax(logits) (Gumbel 1954; Maddison et al.,
arXiv:1411.0030, sec. 2); nucleus sampling, Holtzman et al., arXiv:1904.09751, sec. 3.1.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

ALL_TOKENS = 0  # a top_k of zero keeps the whole vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
  """How each row of a batch picks its tokens.

  Attributes:
    temperature: [B] float32, >= 0; 0 is greedy.
    top_k: [B] int32, tokens kept before top_p; 0 keeps all.
    top_p: [B] float32 in (0, 1], probability mass kept after top_k; 1 keeps all.
    min_p: [B] float32 in [0, 1), least probability kept, as a share of the likeliest token's; 0 keeps all.
    seed: [B] uint32; two rows with one prompt and one seed give one answer.
  """

  temperature: Float[Array, "B"]
  top_k: Int[Array, "B"]
  top_p: Float[Array, "B"]
  min_p: Float[Array, "B"]
  seed: UInt32[Array, "B"]


def rows(
  batch: int, temperature: float, top_k: int, top_p: float, seed: int | Sequence[int], min_p: float = 0.0
) -> Sampling:
  """Returns the same settings for `batch` rows; `seed` may be one for all or one a row."""
  return Sampling(
    temperature=np.full(batch, temperature, np.float32),
    top_k=np.full(batch, min(top_k, np.iinfo(np.int32).max), np.int32),
    top_p=np.full(batch, top_p, np.float32),
    min_p=np.full(batch, min_p, np.float32),
    seed=np.broadcast_to(np.asarray(seed, np.uint32), (batch,)),
  )


def kept_tokens(
  logits: Float[Array, "B V"],
  top_k: Int[Array, "B"],
  top_p: Float[Array, "B"],
  min_p: Float[Array, "B"],
) -> Bool[Array, "B V"]:
  """Marks the tokens that top-k, top-p and min-p leave, at least one a row.

  top_p counts the mass of what top_k left, as in Hugging Face transformers: the fewest tokens whose
  renormalised probability reaches top_p. Ties are broken towards the lowest id, so exactly
  min(top_k, V) tokens pass top-k.

  Args:
    logits: [B, V] float32, already divided by the temperature.
    top_k: [B] tokens kept, 0 for all.
    top_p: [B] mass kept, in (0, 1].
    min_p: [B] least probability kept over the largest one, in [0, 1).

  Returns:
    [B, V] True for a token that may be drawn.
  """
  V = logits.shape[-1]
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  limit = jnp.where(top_k == ALL_TOKENS, V, jnp.clip(top_k, 1, V))
  in_top_k = jnp.arange(V) < limit[:, None]
  probability = jax.nn.softmax(ranked, axis=-1, where=in_top_k)
  before = jnp.cumsum(probability, axis=-1) - probability
  # rounding of the sum must not drop a tail that top_p = 1 keeps
  in_top_p = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
  last = jnp.maximum(jnp.sum(in_top_k & in_top_p, axis=-1, keepdims=True) - 1, 0)
  floor = jnp.take_along_axis(ranked, last, axis=-1)
  last_id = jnp.take_along_axis(order, last, axis=-1)
  likely = logits - ranked[:, :1] >= jnp.log(min_p)[:, None]
  return ((logits > floor) | ((logits == floor) & (jnp.arange(V) <= last_id))) & likely


def sample(logits: Float[Array, "B V"], position: Int[Array, "B"], sampling: Sampling) -> Int[Array, "B"]:
  """Picks one token a row; greedy rows take the lowest id among equal maxima.

  The noise of a row comes from its seed and the position of the token it picks, indexed by token id.
  Work that no row asks for is skipped at run time: greedy batches draw nothing, unfiltered ones sort
  nothing.

  Args:
    logits: [B, V] float32, any scale, finite or -inf.
    position: [B] int32, index in the whole sequence of the token to pick, prompt included.
    sampling: settings of the B rows.

  Returns:
    [B] int32 token ids.
  """
  greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  is_greedy = sampling.temperature <= 0

  def draw() -> Int[Array, "B"]:
    # the maximum becomes 0 first, so that a tiny temperature gives -inf elsewhere and never inf - inf
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(is_greedy, 1.0, sampling.temperature)[:, None]
    filters = (sampling.top_k != ALL_TOKENS) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
    filtered = jax.lax.cond(
      jnp.any(filters),
      lambda x: jnp.where(kept_tokens(x, sampling.top_k, sampling.top_p, sampling.min_p), x, -jnp.inf),
      lambda x: x,
      scaled,
    )
    drawn = jnp.argmax(filtered + _gumbel(sampling.seed, position, logits.shape[-1]), axis=-1)
    return jnp.where(is_greedy, greedy, drawn.astype(jnp.int32))

  return jax.lax.cond(jnp.all(is_greedy), lambda: greedy, draw)


def _gumbel(seed: UInt32[Array, "B"], position: Int[Array, "B"], vocabulary: int) -> Float[Array, "B V"]:
  def row(seed, position):
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocabulary,), jnp.float32)

  return jax.vmap(row)(seed, position)
