"""Expert choice: sigmoid scores, a bias that only selects, renormalised weights. Source: spec 2.7."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from MaxText.common import params
from MaxText.configs.schema import Config


class Router(nnx.Module):
  """Scores every expert for every token, in float32 throughout."""

  def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
    self.cfg = cfg
    E, D = cfg.num_experts, cfg.base_emb_dim
    draw = params.kaiming_uniform(D)
    self.weight = params.param(rngs, (E, D), ("expert", "embed"), cfg.parameter_dtype, draw)
    self.e_score_correction_bias = params.param(rngs, (E,), ("expert",), "float32", params.zeros)

  def __call__(self, x: Float[Array, "M D"]) -> tuple[Int[Array, "M A"], Float[Array, "M A"]]:
    """Chooses A experts for each of M tokens x [M, D].

    Returns:
      expert ids [M, A] int32 and combine weights [M, A] float32.
    """
    logits = jnp.einsum(
      "md,ed->me",
      x.astype(jnp.float32),
      self.weight[...].astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
    softmax = self.cfg.routed_score_func == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    return choose_experts(scores, self.e_score_correction_bias[...], self.cfg)


def choose_experts(
  scores: Float[Array, "M E"], bias: Float[Array, "E"], cfg: Config
) -> tuple[Int[Array, "M A"], Float[Array, "M A"]]:
  """Selects by biased score and weights by the unbiased one.

  Args:
    scores: [M, E] float32 scores in [0, 1].
    bias: [E] float32 correction; it moves the selection, never the weights, and has no gradient.
    cfg: states A, the groups, renormalisation and the scaling factor.

  Returns:
    ids [M, A] int32, lowest id first among ties, and weights [M, A] float32.
  """
  biased = _keep_best_groups(
    jax.lax.stop_gradient(scores + bias), cfg.n_routing_groups, cfg.topk_routing_group
  )
  _, ids = jax.lax.top_k(biased, cfg.num_experts_per_tok)
  weights = jnp.take_along_axis(scores, ids, axis=-1)
  if cfg.norm_topk_prob:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
  return ids, weights * cfg.routed_scaling_factor


def update_router_bias(
  bias: Float[Array, "*C E"], counts: Int[Array, "*C E"], rate: float
) -> Float[Array, "*C E"]:
  """Moves the selection bias one step towards equal loads, without a loss: DeepSeek-V3's sign rule.

  An expert with fewer tokens than the mean gains `rate`, one with more loses it. The step's own mean is taken
  off: what all experts have in common selects nothing, and would drift.

  Args:
    bias: [..., E] float32 correction of each expert, of one router or of a stack.
    counts: [..., E] tokens that each expert got since the last update, over all devices.
    rate: size of the step, > 0.

  Returns:
    [..., E] the new bias; the old one where no token came.
  """
  load = counts.astype(jnp.float32)
  step = jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
  return bias + rate * (step - jnp.mean(step, axis=-1, keepdims=True))


def _keep_best_groups(biased: Float[Array, "M E"], groups: int, kept: int) -> Float[Array, "M E"]:
  """Sends experts outside the `kept` best groups to -inf; a group counts by its two best experts."""
  if kept >= groups:
    return biased
  M, E = biased.shape
  grouped = biased.reshape(M, groups, E // groups)
  strength = jnp.sum(jax.lax.top_k(grouped, min(2, E // groups))[0], axis=-1)
  _, best = jax.lax.top_k(strength, kept)
  open_group = jnp.any(best[..., None] == jnp.arange(groups), axis=1)
  return jnp.where(open_group[..., None], grouped, -jnp.inf).reshape(M, E)
