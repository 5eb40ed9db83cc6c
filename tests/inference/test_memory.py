"""Sizes are those of the arrays that a model really has, from the configuration alone."""

import os

import jax
import pytest
from flax import nnx

from MaxText import decode, serve
from MaxText.common.errors import InputError
from MaxText.inference import memory
from MaxText.models import registry
from MaxText.models.kimi_k3 import init_cache
from tests.small import k3_config, kimi_linear_config

CONFIGS = {
  "k3": k3_config(),
  "k3-dequantized": k3_config(expert_quantization="mxfp4", expert_weights="dequantized"),
  "k3-packed-bfloat16": k3_config(expert_quantization="mxfp4", dtype="bfloat16"),
  "kimi-linear": kimi_linear_config(weight_dtype="bfloat16"),
}


def nbytes(tree):
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_weight_bytes_are_those_of_the_parameters(cfg):
  held = nbytes(nnx.state(registry.abstract(cfg)))
  # counted as stored: the padding of A_log is in the file and not in memory
  assert held <= memory.weight_bytes(cfg) <= held * 1.001


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_cache_bytes_are_those_of_the_caches(cfg):
  caches = jax.eval_shape(lambda: init_cache(cfg, registry.layer_plan(cfg), 3, 40))
  assert memory.cache_bytes(cfg, 3, 40) == nbytes(caches)


def test_what_does_not_fit_is_refused_with_the_sizes(monkeypatch):
  cfg = k3_config()
  monkeypatch.setattr(
    memory, "available_bytes", lambda devices=None: (2 * memory.weight_bytes(cfg), "test memory")
  )
  memory.check_fits(cfg)
  with pytest.raises(
    InputError, match=r"too large for this machine: needs .* GiB caches\), available .* of test"
  ):
    memory.check_fits(cfg, batch=10_000, capacity=1000)


@pytest.mark.parametrize("ours, moments, copies", [({}, 2, 4), ({}, 0, 2), ({"lora_rank": 2}, 2, 1)])
def test_training_needs_gradients_and_moments_too(monkeypatch, ours, moments, copies):
  cfg = k3_config().model_copy(update=ours)
  needed = copies * memory.weight_bytes(cfg)
  monkeypatch.setattr(memory, "available_bytes", lambda devices=None: (needed, "test memory"))
  memory.check_trains(cfg, moments)
  monkeypatch.setattr(memory, "available_bytes", lambda devices=None: (needed - 1, "test memory"))
  words = r"too large to train on this machine: needs .* weights, .* gradients, .* optimizer moments\), avail"
  with pytest.raises(InputError, match=words):
    memory.check_trains(cfg, moments)


class Accelerator:
  """A device that says what it holds, as GPUs and TPUs do."""

  platform, device_kind = "tpu", "TPU"

  def memory_stats(self):
    return {"bytes_limit": 16 * memory.GIB, "bytes_in_use": memory.GIB}


def test_memory_is_that_of_the_devices_that_hold_the_model(monkeypatch):
  monkeypatch.setattr(memory.jax, "local_devices", lambda: [Accelerator()] * 4)
  assert memory.available_bytes(1) == (15 * memory.GIB, "TPU memory")
  assert memory.available_bytes(None) == (60 * memory.GIB, "4 x TPU memory")
  cfg = k3_config()
  monkeypatch.setattr(memory, "weight_bytes", lambda cfg: 20 * memory.GIB)
  memory.check_fits(cfg, devices=2)
  with pytest.raises(
    InputError, match="needs 20.0 GiB .* available 15.0 GiB of TPU memory; mesh=NAME .* 4 dev"
  ):
    memory.check_fits(cfg)


@pytest.mark.parametrize(
  "command, arguments, devices",
  [
    (decode, [], 1),
    (decode, ["mesh=cpu-8"], None),
    (serve, [], 1),
    (serve, ["mesh=cpu-8", "slots=8", "pages=64"], 8),
  ],
)
def test_commands_ask_for_the_memory_of_their_own_devices(monkeypatch, capsys, command, arguments, devices):
  asked = []
  monkeypatch.setattr(memory, "available_bytes", lambda devices: asked.append(devices) or (0, "test memory"))
  assert command.main(["kimi-k3-tiny", "prompt=x"][: 1 + (command is decode)] + arguments) == 2
  assert "too large" in capsys.readouterr().err and asked == [devices]


def test_a_container_leaves_what_it_has_not_used(tmp_path):
  limit, used, statistics = (tmp_path / name for name in ("limit", "used", "stat"))
  assert memory._container_bytes(limit, used, statistics) is None
  limit.write_text("max\n")
  assert memory._container_bytes(limit, used, statistics) is None
  limit.write_text("1000\n")
  used.write_text("700\n")
  statistics.write_text("active_file 50\ninactive_file 200\n")
  assert memory._container_bytes(limit, used, statistics) == 500


def test_host_memory_is_within_what_is_installed():
  assert 0 < memory.host_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
