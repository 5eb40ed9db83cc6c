"""Low-rank adapters: nothing at the start, the only thing that learns, and the same merged as hanging on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.common.errors import ConfigError
from MaxText.layers.attention_mla import GatedLatentAttention
from MaxText.layers.cache import MlaCache
from MaxText.layers.latent_moe import Experts
from MaxText.layers.lora import LoRAParam
from MaxText.models.adapters import attach, has_adapters, merged
from tests.models.conftest import IDS, K3, load
from tests.models.test_laws import ids, row
from tests.reference.generator import k3_config_json, write_checkpoint
from tests.small import k3_config

EVERYTHING = ("self_attn", "mlp", "block_sparse_moe", "lm_head")
RANK = dict(lora_rank=4, lora_alpha=8.0)


def adapted(directory, targets=EVERYTHING, *, start=False, **ours):
  """A loaded decoder with adapters; their B are moved off 0 unless `start`."""
  model = load(directory, **ours)
  attach(model, model.cfg.model_copy(update=dict(lora_targets=targets, **RANK)), nnx.Rngs(1))
  return model if start else moved(model)


def moved(module):
  """Gives every B values, so that the adapter does something."""
  state = nnx.state(module, LoRAParam)
  for n, (path, variable) in enumerate(nnx.to_flat_state(state)):
    if path[-1] == "b":
      rng = np.random.default_rng(n)
      variable.set_value(jnp.asarray(0.05 * rng.standard_normal(variable[...].shape), jnp.float32))
  nnx.update(module, state)
  return module


def program(model):
  """Compiled (state, ids, segment ids) -> logits, for every decoder with the graph of `model`."""
  graph = nnx.split(model)[0]
  return jax.jit(lambda state, i, s: nnx.merge(graph, state)(i, None, s)[0])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """A dense layer, and two cycles of full and linear attention for the scan to find."""
  config = k3_config_json(**K3 | dict(num_hidden_layers=5, full_attn_layers=(2, 4)), **IDS)
  return write_checkpoint(tmp_path_factory.mktemp("adapters"), config, seed=3, dtype="f32", packed=False)


@pytest.fixture(scope="module")
def on(directory):
  return adapted(directory)


@pytest.fixture(scope="module")
def adapted_program(on):
  return program(on)


@pytest.fixture(scope="module")
def logits(on, adapted_program):
  return adapted_program(nnx.state(on), *row(ids(0)))


def assert_logits_equal(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


def test_adapters_are_the_identity_at_the_start_and_merged_equals_hanging_on(
  directory, on, adapted_program, logits
):
  bare = load(directory)
  bare_program = program(bare)
  want = bare_program(nnx.state(bare), *row(ids(0)))
  start = nnx.state(adapted(directory, start=True))
  assert_logits_equal(adapted_program(start, *row(ids(0))), want)
  assert float(jnp.abs(logits - want).max()) > 0.1
  folded = merged(on)
  assert has_adapters(on) and not has_adapters(folded)
  assert_logits_equal(bare_program(nnx.state(folded), *row(ids(0))), logits)


def test_a_new_adapter_has_a_zero_b_and_a_kaiming_a(directory):
  model = adapted(directory, ("q_proj",), start=True)
  lora = model.layers[0].self_attn.q_proj.lora
  assert not np.any(lora.b[...]) and lora.b[...].dtype == np.float32
  bound = lora.a[...].shape[1] ** -0.5
  assert 0.9 * bound < np.abs(lora.a[...]).max() <= bound
  assert lora.scale == 2.0


@pytest.mark.slow  # a file restores into either layout in tests/checkpoints
def test_scanned_and_unrolled_decoders_compute_the_same(directory, on, logits):
  scanned = adapted(directory, start=True, scan_layers=True)
  assert scanned.plan.repeats == 2
  for layer in range(5):
    part, index, at = scanned.plan.location(layer)
    own = nnx.state(getattr(scanned, part)[index], LoRAParam)
    given = dict(nnx.to_flat_state(nnx.state(on.layers[layer], LoRAParam)))
    for path, variable in nnx.to_flat_state(own):
      value = given[path][...]
      variable.set_value(value if at is None else variable[...].at[at].set(value))
    nnx.update(getattr(scanned, part)[index], own)
  nnx.update(scanned.lm_head, nnx.state(on.lm_head))
  assert_logits_equal(program(scanned)(nnx.state(scanned), *row(ids(0))), logits)


@pytest.mark.slow  # tests/training/test_sft.py shows it of a run
def test_only_adapters_learn(on):
  graph, lora, rest = nnx.split(on, LoRAParam, ...)

  def loss(lora, i, s):
    return jnp.sum(nnx.merge(graph, lora, rest).hidden(i, None, s)[0] ** 2)

  grads = jax.jit(jax.grad(loss))(lora, *row(ids(3)))
  flat = {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(grads)}
  assert all(path.endswith((".a", ".b")) for path in flat)
  blind = [path for path, value in flat.items() if not value.any() and "lm_head" not in path]
  assert blind == []


def test_the_absorbed_form_counts_the_adapter_of_the_expansion():
  cfg = k3_config(lora_targets=("kv_b_proj",), **RANK)
  layer = GatedLatentAttention(cfg, rngs=nnx.Rngs(0))
  attach(nnx.Dict(self_attn=layer), cfg, nnx.Rngs(1))
  moved(layer)
  empty = MlaCache(jnp.zeros((2, 8, cfg.latent_width)), jnp.zeros(2, jnp.int32))

  def in_two_calls(x):
    head, cache = layer(x[:, :4], empty)
    return jnp.concatenate([head, layer(x[:, 4:], cache)[0]], axis=1)

  x = jax.random.normal(jax.random.key(0), (2, 5, cfg.base_emb_dim))
  outs = []
  for impl in ("absorbed", "reference"):
    layer.cfg = cfg.model_copy(update={"mla_impl": impl})
    outs.append(jax.jit(lambda x: in_two_calls(x))(x))
  got, want = outs
  folded = merged(nnx.Dict(self_attn=layer)).self_attn
  assert not np.array_equal(folded.k_up[...], layer.k_up[...])
  assert not np.array_equal(folded.v_up[...], layer.v_up[...])
  bound = 1e-5 * float(jnp.abs(want).max())
  np.testing.assert_allclose(got, want, rtol=0, atol=bound)
  np.testing.assert_allclose(jax.jit(lambda x: folded(x)[0])(x), want, rtol=0, atol=bound)
  del layer.kv_b_lora
  assert float(jnp.abs(jax.jit(lambda x: layer(x)[0])(x) - got).max()) > 100 * bound


def expert_problem(**ours):
  cfg = k3_config(lora_targets=("experts",), **RANK, **ours).model_copy(update={"initializer_range": 0.15})
  experts = Experts(cfg, rngs=nnx.Rngs(0))
  attach(nnx.Dict(experts=experts), cfg, nnx.Rngs(1))
  z = jax.random.normal(jax.random.key(0), (6, cfg.expert_input_dim))
  picks, weights = jnp.arange(12).reshape(6, 2) % cfg.num_experts, jnp.full((6, 2), 0.5)
  return experts, (z, picks, weights, jnp.arange(6) < 5)


@pytest.mark.parametrize("kind", ["shared_a", "per_expert"])
def test_expert_adapters_equal_the_merged_experts(kind):
  experts, inputs = expert_problem(lora_experts=kind, expert_quantization="none")
  start, _ = experts(*inputs)
  got, _ = moved(experts)(*inputs)
  folded = merged(nnx.Dict(experts=experts)).experts
  np.testing.assert_allclose(got, folded(*inputs)[0], rtol=0, atol=1e-5 * float(jnp.abs(got).max()))
  assert float(jnp.abs(got - start).max()) > 1e-3
  bare, _ = Experts(experts.cfg, rngs=nnx.Rngs(0))(*inputs)
  np.testing.assert_allclose(start, bare, rtol=0, atol=1e-6 * float(jnp.abs(bare).max()))
  shared = experts.w1_lora.a[...].ndim == 2
  assert shared == (kind == "shared_a")
  assert experts.w1_lora.b[...].shape[-1] == (4 if shared else 4 // experts.cfg.num_experts_per_tok)


@pytest.mark.parametrize("kind", ["shared_a", "per_expert"])
def test_a_stack_of_experts_takes_the_adapters_of_the_layer_in_use(kind):
  """Decoding under a scan closes over whole stacks of experts and of what hangs on them."""
  (one, inputs), (other, _) = (expert_problem(lora_experts=kind) for _ in range(2))
  moved(other)
  graph, states = nnx.split(one)[0], [nnx.state(one), nnx.state(other)]
  stack = nnx.merge(graph, jax.tree.map(lambda *layers: jnp.stack(layers), *states))
  for layer, alone in enumerate((one, other)):
    np.testing.assert_array_equal(stack(*inputs, row=jnp.int32(layer))[0], alone(*inputs)[0])


def test_packed_experts_take_adapters_and_refuse_to_merge():
  experts, inputs = expert_problem(expert_quantization="mxfp4", expert_weights="packed")
  start, _ = experts(*inputs)
  got, _ = moved(experts)(*inputs)
  assert float(jnp.abs(got - start).max()) > 1e-4
  with pytest.raises(ConfigError, match="experts.w1: adapters do not merge into packed experts"):
    merged(nnx.Dict(experts=experts))


def test_experts_rounded_in_training_are_frozen_at_their_packed_values_below_adapters():
  plain = dict(expert_quantization="mxfp4", expert_weights="dequantized", mxfp4_qat=True)
  rounded, inputs = expert_problem(**plain)
  unadapted = Experts(rounded.cfg, rngs=nnx.Rngs(0))
  np.testing.assert_allclose(rounded(*inputs)[0], unadapted(*inputs)[0], rtol=0, atol=1e-6)


def test_a_target_that_names_nothing_is_one_line_with_the_near_miss(k3_plain):
  cfg = k3_plain.cfg.model_copy(update=dict(lora_targets=("q_prj",), **RANK))
  with pytest.raises(ConfigError, match="'q_prj' names no matrix of .*, did you mean 'q_proj'"):
    attach(nnx.clone(k3_plain), cfg, nnx.Rngs(0))
  with pytest.raises(ConfigError, match="lora_rank: got 0"):
    attach(nnx.clone(k3_plain), k3_plain.cfg, nnx.Rngs(0))


@pytest.mark.parametrize(
  "target, some, others",
  [
    ("q_proj", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"),
    ("shared_experts.up_proj", "layers.1.block_sparse_moe.shared_experts.up_proj", "layers.0.mlp.up_proj"),
    ("experts", "layers.1.block_sparse_moe.experts", "layers.1.block_sparse_moe.shared_experts"),
    ("kv_b_proj", "layers.1.self_attn.kv_b_lora", "layers.1.self_attn.o_proj"),
  ],
)
def test_a_target_is_a_part_of_a_published_path(k3_plain, target, some, others):
  model = nnx.clone(k3_plain)
  attach(model, k3_plain.cfg.model_copy(update=dict(lora_targets=(target,), **RANK)), nnx.Rngs(0))
  paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, LoRAParam))]
  assert any(path.startswith(some) for path in paths) and not any(path.startswith(others) for path in paths)
