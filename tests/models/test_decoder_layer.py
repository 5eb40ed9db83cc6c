"""One whole decoder layer against its fixture: both mixes, KDA, the expert block and both additions."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.layers.attn_res import ResidualStream
from MaxText.models.kimi_k3 import DecoderLayer
from tests.layers.test_latent_moe import FIXTURE
from tests.layers.test_latent_moe import fixture_values as moe_values
from tests.op_fixtures import assert_op_close, load_fixture
from tests.small import fill, k3_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj")


def layer_values(data) -> dict:
  attention = {f"self_attn.{name}.weight": data[f"self_attn_{name}_weight"] for name in ATTENTION}
  conv = np.stack([data[f"self_attn_{name}_conv1d_weight"][:, 0] for name in "qkv"])
  norms = ("input_layernorm", "post_attention_layernorm")
  mixes = ("self_attention_res", "mlp_res")
  return (
    attention
    | {f"block_sparse_moe.{name}": value for name, value in moe_values(data, "mlp_").items()}
    | {f"{name}.scale": data[f"{name}_weight"] for name in norms}
    | {f"{name}.norm.scale": data[f"{name}_norm_weight"] for name in mixes}
    | {f"{name}.proj": data[f"{name}_proj_weight"][0] for name in mixes}
    | {
      "self_attn.qkv_conv1d.weight": conv,
      "self_attn.A_log": data["self_attn_A_log"],
      "self_attn.dt_bias": data["self_attn_dt_bias"].reshape(4, 16),
      "self_attn.o_norm.scale": data["self_attn_o_norm_weight"],
    }
  )


def test_layer_fixture():
  data = load_fixture("layer_kda")
  cfg = k3_config(**FIXTURE, kda_num_heads=4, kda_head_dim=16, attn_res_block_size=3)
  layer = DecoderLayer(cfg, 1, rngs=nnx.Rngs(0))
  fill(layer, layer_values(data))
  blocks = jnp.asarray(data["block_residual_in"]).transpose(1, 0, 2)[:, None]
  stream = ResidualStream(jnp.asarray(data["in"]), blocks, 2)
  graph, state = nnx.split(layer)
  run = jax.jit(lambda state: nnx.merge(graph, state)(stream, None, None, layer=1)[0])
  out = run(state)
  assert_op_close(out.prefix, data["out"])
  assert_op_close(out.blocks[:, 0].transpose(1, 0, 2), data["block_residual_out"])
