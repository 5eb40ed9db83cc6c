"""The whole decoder in bfloat16 on a CPU, where XLA lacks some bfloat16 products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.conftest import load


@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
def test_bfloat16_follows_float32(family, request):
  directory = request.getfixturevalue(f"{family}_directory")
  wide, narrow = load(directory), load(directory, dtype="bfloat16")
  ids = np.random.default_rng(8).integers(0, 61, (1, 12)).astype(np.int32)
  want = jax.jit(lambda ids: wide(ids)[0])(ids)
  got, cache = jax.jit(lambda ids: narrow(ids, narrow.init_cache(1, 16)))(ids)
  states = [layer.state for layer in cache.layers if hasattr(layer, "state")]
  assert got.dtype == jnp.float32 and {state.dtype for state in states} == {jnp.dtype("float32")}
  spread = float(jnp.std(want))
  assert 0 < float(jnp.abs(got - want).max()) < 0.35 * spread


def test_decay_is_computed_in_float32(k3_directory):
  """With bfloat16 weights the rate exp(A_log) keeps its float32 value."""
  narrow, wide = load(k3_directory, dtype="bfloat16"), load(k3_directory)
  np.testing.assert_array_equal(narrow.layers[0].self_attn.A_log[...], wide.layers[0].self_attn.A_log[...])
  assert narrow.layers[0].self_attn.A_log[...].dtype == jnp.float32
