"""A decoder of a few lines with the call contract of the real one, so that the loop compiles in no time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.common.params import normal, param

VOCAB, WIDTH = 23, 8


class ToyConfig(NamedTuple):
  """The keys that the loop reads."""

  base_emb_dim: int
  dtype: str


class ToyDecoder(nnx.Module):
  """A recurrent network whose cache also records every token that it read."""

  def __init__(self, seed: int = 0):
    rngs = nnx.Rngs(seed)
    self.cfg = ToyConfig(WIDTH, "float32")
    self.embedding = param(rngs, (VOCAB, WIDTH), ("vocab", "embed"), "float32", normal(1.0))
    self.recurrent = param(rngs, (WIDTH, WIDTH), ("embed", None), "float32", normal(WIDTH**-0.5))
    self.head = param(rngs, (WIDTH, VOCAB), ("embed", "vocab"), "float32", normal(3.0))

  def init_cache(self, batch, capacity):
    return {
      "state": jnp.zeros((batch, WIDTH)),
      "tokens": jnp.full((batch, capacity), -1, jnp.int32),
      "length": jnp.zeros(batch, jnp.int32),
    }

  def hidden(self, ids, cache, segment_ids):
    cache = self.init_cache(*ids.shape) if cache is None else cache

    def step(cache, token):
      ids, valid = token
      state = jnp.tanh(self.embedding[...][ids] + cache["state"] @ self.recurrent[...])
      row = jnp.arange(ids.shape[0])
      slot = jnp.where(valid, cache["length"], cache["tokens"].shape[1])
      cache = {
        "state": jnp.where(valid[:, None], state, cache["state"]),
        "tokens": cache["tokens"].at[row, slot].set(ids, mode="drop"),
        "length": cache["length"] + valid,
      }
      return cache, cache["state"]

    cache, states = jax.lax.scan(step, cache, (ids.T, segment_ids.T != 0))
    return states.swapaxes(0, 1), cache

  def logits(self, hidden):
    return hidden @ self.head[...]

  def __call__(self, ids, cache=None, segment_ids=None):
    hidden, cache = self.hidden(ids, cache, segment_ids)
    return self.logits(hidden), cache
