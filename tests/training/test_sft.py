"""`python -m MaxText.sft`: starts as the base; adapters change nothing else and merge into the same model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText import sft
from MaxText.checkpoints.adapters import load_adapters
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.common.errors import ConfigError
from MaxText.configs import loader
from MaxText.configs.options import SftOptions
from MaxText.models import registry
from MaxText.models.adapters import merged
from MaxText.tokenizers.registry import load_tokenizer
from tests.training.test_train import ASSETS, SMALL, losses, train

pytestmark = [pytest.mark.train, pytest.mark.usefixtures("kept_programs")]
LENGTH = 96
LORA = "lora_rank=2 lora_targets=self_attn,shared_experts".split()
CHATS = [
  {"messages": [{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y" * n}]}
  for n in (1, 5, 9)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """A directory with random weights to adapt, and chats."""
  path = tmp_path_factory.mktemp("sft")
  cfg = loader.load("kimi-k3-tiny", [*SMALL, "expert_weights=dequantized", "scan_layers=true"])
  save_orbax(registry.build(cfg, nnx.Rngs(0)), path / "base", companions=ASSETS)
  (path / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
  return path


def tuned(base, name, *arguments):
  """Directory of a run of three steps."""
  given = f"grain_train_files={base}/chats.jsonl steps=3 run_name={name} max_target_length={LENGTH}".split()
  given += "warmup_steps_fraction=0 thinking=false per_device_batch_size=1".split()
  done = train(base, base / "base", *given, *arguments, command=sft.main)
  assert done.returncode == 0, done.stderr[-2000:]
  return base / name


@pytest.fixture(scope="module")
def run(base):
  """Three steps of adapters."""
  return tuned(base, "run", "learning_rate=0.05", *LORA)


@nnx.jit
def forward(decoder, ids, segments):
  return decoder(ids, None, segments)[0]


def logits(decoder, batch):
  """Logits of one batch of chats, so that all calls share a program for each kind of decoder."""
  return forward(decoder, jnp.asarray(batch["inputs"]), jnp.asarray(batch["inputs_segmentation"]))


@pytest.fixture(scope="module")
def batch(base):
  """What the first step of the run saw."""
  pytest.importorskip("grain")
  from MaxText.tokenizers.chat.formats import chat_format
  from MaxText.tokenizers.chat.options import ChatOptions
  from MaxText.training.chat_rows import find_chats, packed_chats

  chat = chat_format(load_tokenizer(ASSETS, 1024))
  options = ChatOptions(thinking=False, thinking_effort=None)
  chats = find_chats("grain_train_files", str(base / "chats.jsonl"), chat, LENGTH, options)
  return next(iter(packed_chats(chats, batch=1, length=LENGTH, seed=0)))


def test_the_first_loss_is_that_of_the_base_on_the_assistant_s_tokens(base, run, batch):
  out = logits(load_params(base / "base", loader.load(base / "base"), progress=False), batch)
  picked = jnp.take_along_axis(jax.nn.log_softmax(out), batch["targets"][..., None], axis=-1)[..., 0]
  counts = batch["targets_segmentation"] != 0
  assert 0 < counts.sum() < (batch["inputs_segmentation"] != 0).sum()
  assert losses(run)[0] == pytest.approx(float(-picked[counts].mean()), rel=1e-5)
  assert losses(run)[2] < losses(run)[0]


def test_only_adapters_changed(base, run):
  cfg = loader.load(base / "base")
  before = ParameterTree(load_params(base / "base", cfg, progress=False)).values
  after = ParameterTree(load_params(run, cfg, progress=False)).values
  assert all(np.array_equal(before[path], after[path]) for path in before)
  added = after.keys() - before.keys()
  assert added and all(path.endswith(("lora.a", "lora.b")) for path in added)
  assert any(np.any(after[path]) for path in added if path.endswith("lora.b"))


def test_the_file_alone_the_run_and_the_merged_weights_are_one_model(base, run, batch):
  cfg = loader.load(base / "base")
  untouched = logits(load_params(base / "base", cfg, progress=False), batch)
  adapted = load_params(base / "base", cfg, progress=False)
  load_adapters(adapted, run / "adapters.safetensors")
  want = logits(adapted, batch)
  assert np.abs(want - untouched).max() > 1e-3
  np.testing.assert_allclose(logits(load_params(run, cfg, progress=False), batch), want, rtol=0, atol=1e-5)
  np.testing.assert_allclose(logits(merged(adapted), batch), want, rtol=0, atol=1e-5)


@pytest.mark.slow  # a training program more
def test_tuning_all_weights_starts_as_adapters_do_and_changes_every_matrix(base, run):
  whole = tuned(base, "whole", "learning_rate=0.003")
  assert losses(whole)[0] == pytest.approx(losses(run)[0], rel=1e-5)
  assert losses(whole)[2] < losses(whole)[0]
  cfg = loader.load(base / "base")
  before, after = (
    ParameterTree(load_params(path, cfg, progress=False)).values for path in (base / "base", whole)
  )
  assert before.keys() == after.keys() and not (whole / "adapters.safetensors").exists()
  still = {path for path in before if np.array_equal(before[path], after[path])}
  # what chooses among a single block of the residual stream
  assert still == {f"layers.0.self_attention_res.{name}" for name in ("proj", "norm.scale")}


def test_adapters_of_nothing_are_refused(tmp_path):
  from MaxText.training import run

  cfg, options = loader.load_command("kimi-k3-tiny", ["lora_rank=2"], SftOptions)
  with pytest.raises(ConfigError, match="lora_rank: adapters need weights .* checkpoint=DIR"):
    run._check_adapters(cfg, options, tmp_path)
