"""Sizes from the configuration alone equal the published ones (spec 6)."""

import pytest

from MaxText.configs.counts import count
from MaxText.configs.loader import load


def test_kimi_k3_has_its_published_size():
  counts = count(load("kimi-k3"))
  assert counts.total == 2_779_484_476_000
  assert counts.active == 104_189_612_640
  assert counts.tensors == 497_052
  assert counts.packed_expert_bytes == 92 * 896 * 17_547_264
  assert round(counts.packed_expert_bytes / 2**30, 2) == 1347.12
  # the released index states 1,560,860,324,864 bytes; vision and projector hold 447,358,976 bf16 values
  assert counts.stored_bytes == 1_560_860_324_864 - 2 * (2_779_931_834_976 - counts.total)


def test_kimi_linear_has_its_published_size():
  """Spec 6's formula with the shapes of section 8, term by term."""
  D, heads = 2304, 32
  kda = 4 * 4096 * D + (128 * D + 4096 * 128)  # q, k, v, o; low-rank output gate
  kda += 128 * D + 4096 * 128 + heads * D + 3 * 4096 * 4 + heads + 4096 + 128
  mla = heads * 192 * D + 576 * D + 512 + heads * 256 * 512 + D * heads * 128
  expert, router, dense = 3 * 1024 * D, 256 * D + 256, 3 * 9216 * D
  table = 163_840 * D
  outside_experts = 20 * kda + 7 * mla + 27 * 2 * D + dense + 26 * (expert + router) + D + table
  counts = count(load("kimi-linear-48b-a3b"))
  assert counts.total == outside_experts + table + 26 * 256 * expert == 49_122_681_728
  assert counts.active == outside_experts + 26 * 8 * expert == 3_106_972_544
  assert counts.tensors == 3 + 27 * 2 + 20 * 15 + 7 * 5 + 3 + 26 * (2 + 3 + 256 * 3) == 20_493
  assert counts.packed_expert_bytes == 0
  assert set(counts.bytes_by_dtype) == {"BF16", "F32"}


def test_the_tiny_model_fits_its_budget():
  counts = count(load("kimi-k3-tiny"))
  assert 500_000 < counts.total < 8_000_000
  assert counts.stored_bytes < 12 * 10**6


@pytest.mark.parametrize(
  ("override", "total", "active"),
  [
    ("num_experts=17", 8 * (144 + 1 + 3 * 64 * 32), 8 * (144 + 1)),
    ("num_experts_per_tok=5", 0, 8 * 3 * 64 * 32),
  ],
)
def test_one_more_expert_costs_itself_and_its_router_row(override, total, active):
  before, after = count(load("kimi-k3-tiny")), count(load("kimi-k3-tiny", [override]))
  assert (after.total - before.total, after.active - before.active) == (total, active)


def test_a_tied_head_is_counted_once_and_read():
  before, after = count(load("kimi-k3-tiny")), count(load("kimi-k3-tiny", ["logits_via_embedding=true"]))
  assert (before.total - after.total, before.tensors - after.tensors) == (1024 * 144, 1)
  assert before.active == after.active


def test_plain_experts_have_the_same_parameters_and_more_bytes():
  packed, plain = count(load("kimi-k3-tiny")), count(load("kimi-k3-tiny", ["expert_quantization=none"]))
  assert (packed.total, packed.active) == (plain.total, plain.active)
  experts = 8 * 16 * 3 * 64 * 32
  assert plain.stored_bytes - packed.stored_bytes == 2 * experts - packed.packed_expert_bytes
  assert packed.packed_expert_bytes == experts * 17 // 32
