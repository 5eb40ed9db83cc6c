"""Multi-head latent attention over a compressed cache, without positions (NoPE).

Dims: B batch, T new tokens, S cache slots, H heads, N nope width, P tail width, R latent rank, V value width.
Source: spec section 2.5.
"""

from typing import Literal

from jaxtyping import Array, Float, Int

from MaxText.common.choices import record
from MaxText.kernels.mla.absorbed import mla_absorbed
from MaxText.kernels.mla.direct import mla_direct
from MaxText.kernels.mla.pages import PageMesh, Pages, Rows, on_ranks
from MaxText.kernels.mla.reference import mla_reference

__all__ = ["MlaImpl", "PageMesh", "Pages", "Rows", "mla", "on_ranks"]

MlaImpl = Literal["auto", "reference", "direct", "absorbed"]

# below this many new tokens, expanding keys and values of the whole prefix costs more than it saves
ABSORBED_MAX_TOKENS = 16

_IMPLEMENTATIONS = {"reference": mla_reference, "direct": mla_direct, "absorbed": mla_absorbed}


def mla(
  q_nope: Float[Array, "B T H N"],
  q_tail: Float[Array, "B T H P"],
  latent: Float[Array, "B T RP"],
  w_uk: Float[Array, "H N R"],
  w_uv: Float[Array, "H V R"],
  *,
  prefix: tuple[Rows, Int[Array, "B"]] | None,
  segment_ids: Int[Array, "B T"] | None,
  scale: float,
  impl: MlaImpl = "auto",
) -> Float[Array, "B T H V"]:
  """Attends from each new token to the tokens of its document, up to and with itself.

  Token t sees token s <= t of this call when both are of one segment, and, if it is the row's first segment,
  the first length[b] rows of the prefix. The prefix is read and never written: the caller appends afterwards.

  Args:
    q_nope: [B, T, H, N] query part that meets the expanded keys.
    q_tail: [B, T, H, P] query part that meets the shared tail of the latent rows.
    latent: [B, T, R+P] cache rows of the new tokens: R normalised latents, then P tail values.
    w_uk: [H, N, R] latent -> key of each head.
    w_uv: [H, V, R] latent -> value of each head.
    prefix: cache rows [B, S, R+P], or `Pages` of them, and how many of each row count, [B] int32; None:
      nothing came before. A prefix longer than one block is read by a loop that follows the longest row and
      has no gradient.
    segment_ids: [B, T] 0 for padding, else the document of the token. None: every token is of one document.
    scale: factor on the scores, (N + P)**-0.5 in Kimi models.
    impl: `reference` materialises all scores, `direct` expands keys and values per head, `absorbed` moves
      w_uk to the query and scores on the latents; `auto` is `absorbed` up to 16 new tokens, else `direct`.

  Returns:
    output [B, T, H, V] in q_nope.dtype, softmax in float32; 0 at padding.
  """
  if impl == "auto":
    impl = "absorbed" if q_nope.shape[1] <= ABSORBED_MAX_TOKENS else "direct"
  record("mla", impl)
  run = _IMPLEMENTATIONS[impl]
  return run(q_nope, q_tail, latent, w_uk, w_uv, prefix=prefix, segment_ids=segment_ids, scale=scale)
