"""SiTU, the capped gated activation of K3, and SwiGLU of Kimi-Linear. Source: spec 2.6."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from MaxText.configs.schema import Config

GatedActivation = Callable[[Float[Array, "*B F"], Float[Array, "*B F"]], Float[Array, "*B F"]]


def situ(
  gate: Float[Array, "*B F"], up: Float[Array, "*B F"], *, beta: float, linear_beta: float | None
) -> Float[Array, "*B F"]:
  """beta tanh(gate/beta) sigmoid(gate) times linear_beta tanh(up/linear_beta), in float32.

  Args:
    gate: [..., F] gate branch; the sigmoid reads it uncapped.
    up: [..., F] linear branch; without `linear_beta` it passes unchanged.
    beta: cap of the gate branch.
    linear_beta: cap of the linear branch, or None.

  Returns:
    [..., F] in gate.dtype, of magnitude below beta * linear_beta.
  """
  g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
  if linear_beta is not None:
    u = linear_beta * jnp.tanh(u / linear_beta)
  return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)


def swiglu(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
  """silu(gate) * up on [..., F], in float32, returned in gate.dtype."""
  return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def gated_activation(cfg: Config) -> GatedActivation:
  """Returns the activation of all three feed-forward kinds of `cfg`; equal settings give one object."""
  return _gated_activation(cfg.hidden_act, cfg.activation_situ_beta, cfg.activation_situ_linear_beta)


@functools.cache
def _gated_activation(kind: str, beta: float | None, linear_beta: float | None) -> GatedActivation:
  return swiglu if kind == "silu" else functools.partial(situ, beta=beta, linear_beta=linear_beta)
