"""Trains the bundled model kimi-k3-tiny on the installed standard library, and measures it on held-out files.

    python scripts/train_tiny.py RUN                       train; with the same directory again, go on
    python scripts/train_tiny.py RUN --export DIRECTORY    write the published directory, and measure it
    python scripts/train_tiny.py RUN --plot PICTURE.png    draw the loss curve (needs matplotlib)

Weights are float32. The routed experts go through the MXFP4 grid in every forward pass and their gradients
straight through it (`mxfp4_qat`), so the packed file computes what was trained.

Dims: N rows of data, B of a step, T tokens of a row, E experts. Source: spec 2.10 (initial values), 2.7.
"""

import argparse
import functools
import json
import pickle
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bits_per_byte import LENGTH, decoder_bits, rows, token_losses  # beside this file
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.write import save_published
from MaxText.configs import loader
from MaxText.models import registry
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.training import standard_library

ASSETS = Path(__file__).parents[1] / "MaxText" / "assets" / "kimi-k3-tiny"
MODEL = "kimi-k3-tiny"
WARMUP = 40  # steps
DECAY = 0.45  # part of the steps at the end over which the rate falls to zero
BALANCE = 1e-2  # step of the router bias
BIAS = "e_score_correction_bias"
_INTO_STREAM = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")
_NOT_MUON = ("lm_head.weight", "b_proj.weight")


def initial_values(tree: ParameterTree, key) -> dict:
  """Replaces the published N(0, 0.02), made for thousands of channels, by a fan-in rule; a zero head."""
  values = {}
  for i, (path, value) in enumerate(tree.values.items()):
    noise = jax.random.normal(jax.random.fold_in(key, i), value.shape)
    if path == "lm_head.weight":
      value = jnp.zeros_like(value)
    elif path == "embed_tokens.embedding":
      value = 0.5 * noise
    elif path.endswith("qkv_conv1d.weight"):
      value = value.at[..., -1].add(0.5)
    elif value.ndim > 1 and not path.endswith("dt_bias"):
      value = noise * value.shape[-1] ** -0.5 * (0.5 if path.endswith(_INTO_STREAM) else 1)
    values[path] = value
  return values


def optimizer(shapes: dict, steps: int, rate: float, adam_rate: float):
  """Muon for matrices inside layers (experts one by one, MLA heads together), Adam for everything else."""

  def dimensions(path, value):
    if path.endswith((".k_up", ".v_up")):
      return MuonDimensionNumbers(reduction_axis=2, output_axis=(0, 1))
    if ".experts." in path:
      return MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    matrix = value.ndim == 2 and path.endswith(".weight") and not path.endswith(_NOT_MUON)
    return MuonDimensionNumbers(reduction_axis=1, output_axis=0) if matrix else None

  def schedule(peak):
    decay = int(DECAY * steps)
    parts = [optax.linear_schedule(0, peak, WARMUP), optax.linear_schedule(peak, 0, decay)]
    return optax.join_schedules(parts, [steps - decay])

  return optax.chain(
    optax.clip_by_global_norm(1.0),
    muon(
      schedule(rate),
      adam_learning_rate=schedule(adam_rate),
      adam_b2=0.95,
      consistent_rms=0.2,
      muon_weight_dimension_numbers={path: dimensions(path, value) for path, value in shapes.items()},
    ),
  )


def count_picks(moe, picks: list) -> None:
  """Makes the router of `moe` append the tokens that it gives to each expert, [E], to `picks`."""
  gate = moe.gate

  def counted(x):
    ids, weights = gate(x)
    picks.append(jnp.sum(ids[..., None] == jnp.arange(moe.cfg.num_experts), axis=(0, 1)))
    return ids, weights

  moe.gate = counted


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(tree, update, state, ids, segments):
  """One step on packed rows [B, T+1]; returns the new state, the loss and the worst load of an expert."""
  params, memory = state

  def mean_loss(params):
    decoder, picks = tree.merge(params), []
    for layer in decoder.layers:
      if hasattr(layer, "block_sparse_moe"):
        count_picks(layer.block_sparse_moe, picks)
    return jnp.mean(token_losses(decoder, ids, segments)), picks

  (loss, picks), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
  changes, memory = update(gradients, memory, params)
  params = optax.apply_updates(params, changes)
  for path, counts in zip((path for path in params if path.endswith(BIAS)), picks):
    params[path] += BALANCE * jnp.sign(jnp.mean(counts) - counts)
  load = jnp.max(jnp.stack([jnp.max(counts) / jnp.mean(counts) for counts in picks]))
  return (params, memory), loss, load


def train(cfg, args) -> None:
  """Trains for the steps that are left, and saves the state every few minutes."""
  tokenizer = KimiTokenizer.from_directory(ASSETS, cfg.vocab_size)
  ids, segments = rows(standard_library()[0], tokenizer, cfg.eos_token_id)
  order = np.random.default_rng(0).permutation(len(ids))
  tree = ParameterTree(registry.abstract(cfg))
  update = optimizer(tree.values, args.steps, args.rate, args.adam_rate)
  first, seconds, state = load_state(args.directory)
  if state is None:
    params = initial_values(ParameterTree(registry.build(cfg, nnx.Rngs(0))), jax.random.key(0))
    state = params, update.init(params)
  started = saved = time.monotonic()
  with (args.directory / "log.jsonl").open("a") as log:
    for step in range(first, args.steps):
      picked = order[np.arange(step * args.batch, (step + 1) * args.batch) % len(ids)]
      state, loss, load = train_step(tree, update.update, state, ids[picked], segments[picked])
      entry = dict(
        step=step + 1, loss=float(loss), load=float(load), seconds=seconds + time.monotonic() - started
      )
      log.write(json.dumps(entry) + "\n")
      log.flush()
      if time.monotonic() - saved > 120 or step + 1 == args.steps:
        saved = time.monotonic()
        save_state(args.directory, step + 1, seconds + saved - started, state)


def load_state(directory: Path):
  """Returns (steps done, seconds taken, state or None) of an earlier run."""
  path = directory / "state.pickle"
  return pickle.loads(path.read_bytes()) if path.exists() else (0, 0.0, None)


def save_state(directory: Path, *entries) -> None:
  """Replaces the saved state in one motion."""
  partial = directory / "state.partial"
  partial.write_bytes(pickle.dumps(jax.device_get(entries)))
  partial.replace(directory / "state.pickle")


def export(cfg, args) -> None:
  """Writes the last state in the published layout, loads that, and prints its held-out bits per byte."""
  step, seconds, (params, _) = load_state(args.directory)
  decoder = ParameterTree(registry.abstract(cfg)).merge({k: jnp.asarray(v) for k, v in params.items()})
  save_published(decoder, cfg, args.export, weight_dtype="bfloat16", companions=ASSETS, overwrite=True)
  tokenizer = KimiTokenizer.from_directory(ASSETS, cfg.vocab_size)
  loaded = load_params(args.export, loader.load(MODEL))
  measured = decoder_bits(loaded, cfg, standard_library()[1], tokenizer)
  print(f"{step} steps, {seconds / 60:.1f} minutes, {measured:.4f} held-out bits per byte")


def plot(args) -> None:
  """Draws the loss of each step and its running mean."""
  import matplotlib.pyplot as plt

  lines = map(json.loads, (args.directory / "log.jsonl").open())
  entries = {entry["step"]: entry for entry in lines}.values()  # a run that went on has some steps twice
  steps, losses = (np.array([entry[key] for entry in entries]) for key in ("step", "loss"))
  mean = np.convolve(losses, np.ones(20) / 20, "valid")
  figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
  axes.plot(steps, losses, color="0.8", linewidth=0.8, label="step")
  axes.plot(steps[19:], mean, label="mean of 20 steps")
  axes.set(xlabel="step", ylabel="training loss (nats a token)", ylim=(mean.min() - 0.3, None))
  axes.legend()
  figure.savefig(args.plot, dpi=120)


def main() -> None:
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("directory", type=Path, help="where the state and the log are")
  parser.add_argument("--steps", type=int, default=1000)
  parser.add_argument("--batch", type=int, default=4, help=f"rows of {LENGTH} tokens a step")
  parser.add_argument("--rate", type=float, default=0.012, help="highest learning rate of Muon")
  parser.add_argument("--adam-rate", type=float, default=0.005, help="highest learning rate of Adam")
  parser.add_argument("--export", type=Path, metavar="DIRECTORY")
  parser.add_argument("--plot", type=Path, metavar="PICTURE")
  args = parser.parse_args()
  args.directory.mkdir(parents=True, exist_ok=True)
  if args.plot:
    plot(args)
    return
  cfg = loader.load(MODEL, ["expert_weights=dequantized", "mxfp4_qat=true", "scan_layers=false"])
  export(cfg, args) if args.export else train(cfg, args)


if __name__ == "__main__":
  main()
