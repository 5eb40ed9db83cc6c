"""Where parameters and caches lie on a mesh; what does not divide is refused, what is whole is listed."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.common.errors import ConfigError, InputError
from MaxText.configs import loader
from MaxText.configs.loader import MESHES, load_mesh
from MaxText.configs.mesh import AxisRules, MeshConfig
from MaxText.configs.options import DecodeOptions, MeshOptions
from MaxText.layers.cache import KdaCache, MlaCache
from MaxText.models import registry
from MaxText.models.kimi_k3 import init_cache
from MaxText.models.sharding import (
  Layout,
  build_layout,
  cache_shardings,
  describe_layout,
  parameter_shardings,
  parameters,
  place,
  replication_report,
)

SIZES = dict.fromkeys(f"ici_{axis}_parallelism" for axis in ("data", "fsdp", "expert", "tensor"))

CYCLES = dict(full_attn_layers=(3, 5, 7, 9))  # a dense layer, then four times linear and full attention


def mesh_config(mesh="cpu-8", **sizes) -> MeshConfig:
  given = {f"ici_{axis}_parallelism": size for axis, size in sizes.items()}
  return load_mesh(MeshOptions(mesh=str(mesh), **(SIZES | given)))


def changed(rules: dict, **sizes) -> Layout:
  cfg = mesh_config(**sizes)
  return build_layout(
    cfg.model_copy(update={"logical_axis_rules": cfg.logical_axis_rules.model_copy(update=rules)})
  )


@functools.cache
def abstract(model: str):
  return registry.abstract(loader.load(model))


def tiny(**ours):
  if not ours:
    return abstract("kimi-k3-tiny")
  return registry.abstract(loader.load("kimi-k3-tiny").model_copy(update=ours))


# --- parameters and caches --------------------------------------------------------------------------------


def test_each_dimension_goes_to_the_axes_of_its_name():
  specs = {path: s.spec for path, s in parameter_shardings(build_layout(mesh_config()), tiny()).items()}
  assert specs["embed_tokens.embedding"] == P("tensor", ("fsdp", "expert"))
  assert specs["layers.0.self_attn.q_proj.weight"] == P("tensor", ("fsdp", "expert"))
  assert specs["layers.0.self_attn.o_proj.weight"] == P(("fsdp", "expert"), "tensor")
  assert specs["layers.0.self_attn.qkv_conv1d.weight"] == P(None, "tensor", None)
  assert specs["layers.3.self_attn.q_a_proj.weight"] == P("tensor", ("fsdp", "expert"))
  assert specs["layers.3.self_attn.q_b_proj.weight"] == P("tensor", ("fsdp", "expert"))
  assert specs["layers.3.self_attn.k_up"] == P("tensor", None, ("fsdp", "expert"))
  for name in ("w1_packed", "w2_packed", "w3_scale"):
    assert specs[f"layers.1.block_sparse_moe.experts.{name}"] == P(("expert", "fsdp", "tensor"), None, None)
  assert specs["norm.scale"] == P(None)


@pytest.mark.parametrize("sizes", [{}, dict(fsdp=1, expert=8, tensor=1), dict(fsdp=4, expert=1, tensor=2)])
def test_a_scanned_parameter_is_laid_out_like_an_unscanned_one(sizes):
  layout = build_layout(mesh_config(**sizes))
  plain = parameter_shardings(layout, tiny(scan_layers=False, **CYCLES))
  scanned = tiny(scan_layers=True, **CYCLES)
  found = 0
  for path, sharding in parameter_shardings(layout, scanned).items():
    part, *rest = path.split(".")
    if part == "cycles":
      layer = scanned.plan.start + int(rest[0])
      want = plain[".".join(("layers", str(layer), *rest[1:]))]
      assert sharding.spec == P(None, *want.spec), path
      found += 1
  assert found > 40


@pytest.mark.parametrize("model", ["kimi-k3-tiny", "kimi-linear-48b-a3b"])
def test_every_stored_dimension_has_a_name_that_the_rules_know(model):
  layout = build_layout(mesh_config(tensor=1, fsdp=4))
  assert all(layout.spec(param.names) is not None for param in parameters(abstract(model)))
  with pytest.raises(AttributeError, match="head"):
    layout.spec(("head", "embed"))


def test_caches_are_split_by_rows_and_heads():
  layout, decoder = build_layout(mesh_config()), tiny(scan_layers=True, **CYCLES)
  cache = jax.eval_shape(lambda: init_cache(decoder.cfg, decoder.plan, 4, 16))
  shardings = cache_shardings(layout, cache)
  rows = ("fsdp", "expert")
  assert shardings.layers[0].state.spec == P(rows, "tensor", None, None)
  assert shardings.layers[0].conv.spec == P(rows, None, None, "tensor")
  kda = next(each for each in shardings.cycles if isinstance(each, KdaCache))
  mla = next(each for each in shardings.cycles if isinstance(each, MlaCache))
  assert kda.state.spec == P(None, rows, "tensor", None, None) and mla.latent.spec == P(
    None, rows, None, None
  )
  assert layout.row_multiple == 4


def test_weights_lie_where_their_shardings_say_and_keep_their_values():
  layout = build_layout(mesh_config(fsdp=1, expert=1))
  cfg = loader.load("kimi-k3-tiny", ["base_num_decoder_layers=2", "full_attn_layers=2"])
  decoder = registry.build(cfg, nnx.Rngs(0))
  placed = place(decoder, layout)
  shardings = parameter_shardings(layout, decoder)
  for (keys, mine), (_, other) in zip(*(nnx.to_flat_state(nnx.state(each)) for each in (placed, decoder))):
    assert mine.get_value().sharding == shardings[".".join(map(str, keys))]
    np.testing.assert_array_equal(mine.get_value(), other.get_value())
  assert placed.layout == layout and decoder.layout is None


def test_an_orbax_checkpoint_is_restored_by_shardings(tmp_path):
  layout = build_layout(mesh_config())
  cfg = loader.load("kimi-k3-tiny", ["base_num_decoder_layers=2", "full_attn_layers=2"])
  decoder = registry.build(cfg, nnx.Rngs(1))
  save_orbax(decoder, tmp_path / "run")
  restored = load_params(
    tmp_path / "run", cfg, mesh_shardings=functools.partial(parameter_shardings, layout), progress=False
  )
  shardings = parameter_shardings(layout, decoder)
  for (keys, mine), (_, other) in zip(*(nnx.to_flat_state(nnx.state(each)) for each in (restored, decoder))):
    assert mine.get_value().sharding == shardings[".".join(map(str, keys))]
    np.testing.assert_array_equal(mine.get_value(), other.get_value())


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "sizes, words",
  [
    (
      dict(tensor=3, fsdp=1, expert=1),
      "ici_tensor_parallelism=3: heads of 4 .*nearest that do: 2 or 4 dev",
    ),
    (dict(tensor=8, fsdp=1, expert=1), "ici_tensor_parallelism=8: heads of 4 .*a size of 8"),
    (
      dict(tensor=1, fsdp=5, expert=1),
      "expert of 16 .*num_experts.*over 5 devices.*4 or 8 dev.*15 or 20",
    ),
  ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_sizes(sizes, words):
  with pytest.raises(ConfigError, match=words) as error:
    parameter_shardings(build_layout(mesh_config(**sizes)), tiny())
  assert "\n" not in str(error.value) and str(error.value).startswith("mesh cpu-8: ")


def test_heads_are_refused_although_their_channels_would_divide():
  with pytest.raises(ConfigError, match=r"heads of 4 \(kda_num_heads.*self_attn.A_log \[4\]"):
    parameter_shardings(build_layout(mesh_config(tensor=8, fsdp=1, expert=1)), tiny())


def test_the_published_model_fits_the_slice_and_is_refused_on_twice_its_heads():
  decoder = registry.abstract(loader.load("kimi-k3", ["weight_dtype=bfloat16"]))

  def planned(tensor):
    cfg = mesh_config("tpu7x-16", tensor=tensor)
    mesh = jax.sharding.AbstractMesh(tuple(cfg.sizes.values()), tuple(cfg.sizes))
    return Layout(mesh, cfg.logical_axis_rules, "mesh tpu7x-16")

  layout = planned(32)
  assert parameter_shardings(layout, decoder)
  held = sum(param.nbytes // math.prod(layout.shards(param.names)) for param in parameters(decoder))
  # on such a slice 45.43 GiB were measured; ours replicates the narrow halves of the decay gates
  assert 45.4 < held / 2**30 < 45.6
  with pytest.raises(ConfigError, match="heads of 96 .*over 64 devices.*48 or 96 devices"):
    parameter_shardings(planned(64), decoder)


def test_experts_are_not_cut_across():
  layout = changed({"expert": ("expert",), "latent": ("tensor",)})
  with pytest.raises(ConfigError, match="logical_axis_rules: latent would cut the experts across"):
    parameter_shardings(layout, tiny())


def test_packed_experts_are_cut_at_whole_scales_only():
  layout = changed({"expert": ("expert", "fsdp"), "expert_mlp": ("tensor",)})
  with pytest.raises(ConfigError, match=r"expert_mlp of 1 \(base_moe_mlp_dim\).*w2_scale \[16, 64, 1\]"):
    parameter_shardings(layout, tiny())
  assert parameter_shardings(layout, tiny(expert_weights="dequantized"))


def test_experts_that_are_rounded_are_cut_at_whole_blocks_only():
  plain = dict(expert_weights="dequantized", mxfp4_qat=True)
  layout = changed({"expert": ("expert", "fsdp"), "expert_mlp": ("tensor",)})
  words = (
    "ici_tensor_parallelism=2: mxfp4_qat: expert_mlp of 32 (base_moe_mlp_dim) does not divide over 2 devices "
    "in whole blocks of 32; nearest that do: 1 devices, or a size of 64"
  )
  with pytest.raises(ConfigError) as error:
    parameter_shardings(layout, tiny(**plain))
  assert str(error.value) == f"mesh cpu-8: {words}"
  assert parameter_shardings(layout, tiny(**plain, base_moe_mlp_dim=64))
  assert parameter_shardings(changed({"expert_mlp": ()}), tiny(**plain))


def test_rows_that_do_not_divide_are_refused():
  layout = build_layout(mesh_config())
  with pytest.raises(InputError, match=r"6 rows \(activation_batch\) .* 4 devices; nearest: 4 or 8 rows"):
    layout.constrain(jnp.zeros((6, 2, 3)), "activation_batch", None, None)


def test_too_few_devices_are_refused():
  with pytest.raises(
    InputError, match=r"needs 16 devices \(data 2 x fsdp 2 x expert 2 x tensor 2\), found 8 .*=16"
  ):
    build_layout(mesh_config(data=2))


# --- what is replicated -----------------------------------------------------------------------------------


def test_the_report_names_all_that_is_held_more_than_once():
  layout, decoder = build_layout(mesh_config()), tiny()
  report = {row.path: row for row in replication_report(layout, decoder)}
  shardings = parameter_shardings(layout, decoder)
  for param in parameters(decoder):
    held = 8 * math.prod(shardings[param.path].shard_shape(param.shape))
    copies = held / math.prod(param.shape)
    assert (report[param.path].copies if param.path in report else 1) == copies
    if param.path in report:
      assert report[param.path].extra_bytes == (copies - 1) * param.nbytes
  assert report["norm.scale"].copies == 8 and "lm_head.weight" not in report
  assert not [path for path in report if ".experts." in path]


def test_the_summary_counts_bytes():
  layout, decoder = build_layout(mesh_config()), tiny()
  text = describe_layout(layout, decoder)
  report = replication_report(layout, decoder)
  assert text.startswith("mesh cpu-8: fsdp 2 x expert 2 x tensor 2; ")
  assert f"replicated: {len(report)} parameters" in text and report[0].path in text
  everywhere = changed(dict.fromkeys(AxisRules.model_fields, ()), fsdp=8, expert=1, tensor=1)
  assert all(row.copies == 8 for row in replication_report(everywhere, decoder))


# --- mesh files -------------------------------------------------------------------------------------------


def test_meshes_of_the_package_load():
  assert {path.stem for path in MESHES.glob("*.yml")} == {"cpu-8", "fsdp", "tpu7x-16"}
  assert mesh_config("cpu-8").devices == 8 and mesh_config("tpu7x-16").devices == 32


@pytest.mark.parametrize(
  "old, new, words",
  [
    ("heads:", "head:", "logical_axis_rules: head: unknown key, did you mean 'heads'?"),
    ("  latent: [tensor]\n", "", "logical_axis_rules: missing key latent"),
    ("vocab: [tensor]", "vocab: [model]", "vocab: got .*expected a list of data, fsdp, expert, tensor"),
    ("vocab: [tensor]", "vocab: [tensor, tensor]", "vocab: names a mesh axis twice"),
    ("expert_mlp: []", "expert_mlp: [tensor]", "expert_mlp: tensor also splits expert"),
    ("mesh_name: cpu-8", "mesh_name: 8", "mesh_name: got 8, expected a string"),
    ("ici_data_parallelism: 1", "ici_data_paralelism: 1", "did you mean 'ici_data_parallelism'?"),
  ],
)
def test_a_mistake_in_a_mesh_file_is_one_line(tmp_path, old, new, words):
  text = (MESHES / "cpu-8.yml").read_text()
  assert old in text
  (tmp_path / "mine.yml").write_text(text.replace(old, new, 1))
  with pytest.raises(ConfigError, match=words) as error:
    mesh_config(tmp_path / "mine.yml")
  assert "\n" not in str(error.value) and "mine.yml" in str(error.value)


def test_an_unknown_mesh_and_sizes_without_one_are_refused():
  with pytest.raises(ConfigError, match=r"cpu-9: no such file or mesh, did you mean 'cpu-8'\?"):
    mesh_config("cpu-9")
  with pytest.raises(ConfigError, match="ici_fsdp_parallelism: needs a mesh"):
    loader.load_command("kimi-k3-tiny", ["ici_fsdp_parallelism=2"], DecodeOptions)


def test_one_axis_takes_the_devices_that_the_others_leave():
  assert mesh_config("fsdp").devices is None and build_layout(mesh_config("fsdp")).mesh.shape["fsdp"] == 8
  layout = build_layout(mesh_config("fsdp", tensor=2))
  assert (layout.mesh.shape["fsdp"], layout.mesh.shape["tensor"]) == (4, 2)
  with pytest.raises(
    ConfigError, match="mesh fsdp: ici_tensor_parallelism=3 does not divide 8 devices; .*2 or 4$"
  ):
    build_layout(mesh_config("fsdp", tensor=3))
  with pytest.raises(ValueError, match="ici_tensor_parallelism: only one size can be -1, and ici_fsdp_para"):
    mesh_config("cpu-8", fsdp=-1, tensor=-1)
  with pytest.raises(ValueError, match="ici_expert_parallelism: 0 devices are no mesh"):
    mesh_config("cpu-8", expert=0)
  with pytest.raises(
    ConfigError, match="ici_tensor_parallelism: only one size can be -1, and ici_fsdp_paral"
  ):
    mesh_config("fsdp", tensor=-1)
