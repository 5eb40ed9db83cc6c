"""The checkpoint that both sides of the benchmark load: about 180M parameters of K3, float32, from a seed."""

from pathlib import Path

from tests.reference.generator import k3_config_json, write_checkpoint

SEED = 20261130
SHAPE = dict(
  hidden_size=512,
  intermediate_size=2048,
  num_hidden_layers=13,
  full_attn_layers=(4, 8, 12, 13),
  num_attention_heads=8,
  kda_heads=8,
  head_dim=64,
  attn_res_block_size=4,
  q_lora_rank=192,
  kv_lora_rank=128,
  qk_nope_head_dim=64,
  qk_rope_head_dim=32,
  v_head_dim=64,
  num_experts=64,
  num_experts_per_token=8,
  moe_intermediate_size=256,
  routed_expert_hidden_size=256,
  num_shared_experts=2,
  vocab_size=8192,
  bos_token_id=8189,
  eos_token_id=8190,
  pad_token_id=8191,
)


def benchmark_checkpoint(workdir: Path) -> Path:
  """Returns the checkpoint's directory, writing it on the first call; an interrupted write is done again."""
  directory = workdir / f"k3-180m-{SEED}"
  done = directory / "complete"
  if not done.exists():
    write_checkpoint(directory, k3_config_json(**SHAPE), SEED, packed=False, dtype="f32")
    done.touch()
  return directory
