"""How the depth is split between unrolled layers and scanned cycles."""

import pytest

from MaxText.configs.loader import load
from MaxText.models.layer_plan import layer_plan
from MaxText.models.registry import abstract
from tests.small import k3_config


def test_k3_is_a_prologue_of_four_twenty_two_cycles_and_the_last_layer():
  plan = layer_plan(load("kimi-k3"), scan=True)
  assert (plan.start, plan.period, plan.repeats, plan.scanned_end) == (4, 4, 22, 92)
  assert plan.location(0) == ("layers", 0, None)
  assert plan.location(91) == ("cycles", 3, 21)
  assert plan.location(92) == ("epilogue", 0, None)
  assert [kind for kind, _ in plan.kinds[4:8]] == ["kda", "kda", "kda", "mla"]


def test_both_last_layers_of_k3_are_full_attention():
  cfg = load("kimi-k3")
  full = [layer for layer in range(93) if cfg.layer_kind(layer) == "mla"]
  assert full == [*range(3, 92, 4), 92] and len(full) == 24


def test_without_scan_every_layer_is_in_one_list():
  plan = layer_plan(load("kimi-k3"), scan=False)
  assert plan.repeats == 0 and plan.location(92) == ("layers", 92, None)


@pytest.mark.parametrize("layers, full", [(1, (1,)), (2, (1, 2)), (6, (2, 4, 5, 6)), (9, (4, 8, 9))])
def test_every_layer_has_one_place_and_its_kind(layers, full):
  cfg = k3_config(dict(num_hidden_layers=layers, full_attn_layers=full))
  plan = layer_plan(cfg, scan=True)
  places = [plan.location(layer) for layer in range(layers)]
  assert len(set(places)) == layers
  for layer, (part, index, row) in enumerate(places):
    if part == "cycles":
      assert plan.kinds[layer] == plan.kinds[plan.start + index] and 0 <= row < plan.repeats


def test_the_whole_k3_has_shapes_without_memory():
  model = abstract(load("kimi-k3", ["scan_layers=true"]))
  experts = model.cycles[0].block_sparse_moe.experts
  assert experts.w1_packed.shape == (22, 896, 3072, 1792)
  assert experts.w1_packed.get_metadata("axes") == ("layers", "expert", "expert_mlp", "latent")
  assert model.cycles[3].self_attn.k_up.shape == (22, 96, 128, 512)
