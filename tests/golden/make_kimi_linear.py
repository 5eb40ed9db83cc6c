"""Makes the Kimi-Linear goldens: a small seeded checkpoint and the logits that transformers gives on it.

Run from the repository root in an environment of its own (Python 3.11 or later):

    pip install torch==2.13.0 'transformers==5.24.*' ml_dtypes
    python -m tests.golden.make_kimi_linear

It writes tests/golden/kimi_linear/ (config.json, model.safetensors in the published naming) and
tests/golden/kimi_linear.npz. transformers converts the published names itself; float32 on the CPU.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM, KimiLinearTopkRouter

from tests.reference.generator import kimi_linear_config_json, write_checkpoint

HERE = Path(__file__).parent
SEED = 20261130
PROMPTS = {"short": 5, "long": 70}  # 70 crosses the chunk of 64 tokens
PREFILL, STEPS = 7, 6


def main() -> None:
  """Writes the checkpoint and every golden array."""
  torch.manual_seed(SEED)
  rng = np.random.default_rng(SEED)
  config = kimi_linear_config_json(
    hidden_size=48,
    num_hidden_layers=5,
    num_attention_heads=3,
    kda_heads=2,
    intermediate_size=56,
    moe_intermediate_size=24,
  )
  directory = write_checkpoint(HERE / "kimi_linear", config, SEED)
  digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
  model, report = KimiLinearForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
  )
  strays = {key: value for key, value in report.items() if value}
  if strays:
    raise RuntimeError(f"transformers did not place every tensor: {strays}")
  arrays = {}
  for name, length in PROMPTS.items():
    arrays[f"{name}_ids"] = rng.integers(0, config["vocab_size"], length)
    arrays[f"{name}_logits"] = whole_prompt(model.eval(), arrays[f"{name}_ids"])
  arrays["steps_ids"] = rng.integers(0, config["vocab_size"], PREFILL + STEPS)
  arrays["steps_logits"] = cached_steps(model, arrays["steps_ids"])
  arrays |= grouped_router(model.config, rng)
  made_by = (
    f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}, seed {SEED}"
  )
  np.savez_compressed(HERE / "kimi_linear.npz", made_by=made_by, weights_sha256=digest, **arrays)
  print(made_by)


@torch.no_grad()
def whole_prompt(model: KimiLinearForCausalLM, ids: np.ndarray) -> np.ndarray:
  """Logits [T, vocabulary] of one forward pass without a cache."""
  return model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()


@torch.no_grad()
def cached_steps(model: KimiLinearForCausalLM, ids: np.ndarray) -> np.ndarray:
  """Logits [STEPS + 1, vocabulary]: after a prefill of PREFILL tokens, and after each single cached step."""
  tokens = torch.from_numpy(ids)[None]
  out = model(tokens[:, :PREFILL], use_cache=True)
  rows = [out.logits[0, -1]]
  for t in range(PREFILL, PREFILL + STEPS):
    out = model(tokens[:, t : t + 1], cache=out.cache, use_cache=True)
    rows.append(out.logits[0, -1])
  return torch.stack(rows).numpy()


@torch.no_grad()
def grouped_router(config, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Choices and weights of a router with four groups of which two take part, which no released model uses."""
  config.num_expert_group, config.topk_group, config.num_experts, config.num_experts_per_token = 4, 2, 16, 3
  router = KimiLinearTopkRouter(config)
  router.weight.data = torch.from_numpy(rng.standard_normal(router.weight.shape) * 0.3).float()
  router.e_score_correction_bias = torch.from_numpy(rng.uniform(-0.2, 0.2, 16)).float()
  x = torch.from_numpy(rng.standard_normal((12, config.hidden_size))).float()
  _, weights, experts = router(x)
  weight, bias = router.weight.numpy(), router.e_score_correction_bias.numpy()
  arrays = {
    "x": x.numpy(),
    "weight": weight,
    "bias": bias,
    "experts": experts.numpy(),
    "weights": weights.numpy(),
  }
  return {f"router_{name}": array for name, array in arrays.items()}


if __name__ == "__main__":
  main()
