"""Rematerialisation: what a layer keeps for its backward pass, by MaxText's key and names.

`full` keeps a layer's inputs and computes the rest again; `minimal` also keeps the outputs of its
projections; `none` keeps everything.
"""

from collections.abc import Callable

import jax

from MaxText.configs.schema import RematPolicy
from MaxText.layers.projection import PROJECTED

_POLICIES = {
  "full": jax.checkpoint_policies.nothing_saveable,
  "minimal": jax.checkpoint_policies.save_only_these_names(PROJECTED),
}


def rematerialised[**P, R](
  body: Callable[P, R], policy: RematPolicy, *, in_scan: bool = False
) -> Callable[P, R]:
  """Wraps a layer, or the body of a scan, so that its backward pass recomputes what `policy` does not keep.

  Args:
    body: function of pytrees of arrays; it may close over weights.
    policy: see above.
    in_scan: the body of a scan; the loop itself keeps XLA from merging the recomputation with the first pass.
  """
  if policy == "none":
    return body
  return jax.checkpoint(body, policy=_POLICIES[policy], prevent_cse=not in_scan)
