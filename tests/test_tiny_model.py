"""The weights in the package: small, of the published layout, and really trained (docs/tiny.md)."""

import math
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import MaxText
from MaxText.checkpoints.accounting import match
from MaxText.checkpoints.reader import open_published
from MaxText.configs import loader
from MaxText.configs.options import DecodeOptions
from MaxText.configs.published import to_published
from MaxText.kernels.mxfp4 import BLOCK

DIRECTORY = Path(MaxText.__file__).parent / "assets" / "kimi-k3-tiny"
MODEL = "kimi-k3-tiny"
LENGTH = 512  # every call has this many tokens, so one program serves them all
# modules that the training run of docs/tiny.md held out
HELD_OUT = ("abc.py", "bisect.py", "codeop.py", "functools.py", "hmac.py", "mailbox.py", "timeit.py")
MOST_BITS_PER_BYTE = 1.68  # measured 1.615 on the middle of these files in Python 3.12.1
PROMPT = "def main("  # of the README, which shows the answer
LEAST_MARGIN = 0.02  # logits; rounding moves them by 1e-4


@pytest.fixture(scope="module")
def model():
  return MaxText.from_pretrained(DIRECTORY)


def log_probabilities(model, ids):
  logits = model.logits(ids).astype(np.float64)
  logits -= logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_the_directory_is_small():
  assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 12 * 10**6


def test_its_configuration_is_the_model_file():
  bundled, model_file = loader.load(DIRECTORY), loader.load(MODEL)
  assert to_published(bundled) == to_published(model_file)


def test_every_tensor_is_expected_and_the_experts_are_mxfp4():
  cfg = loader.load(MODEL)
  files = open_published(DIRECTORY)
  _, specs = match(files, cfg)
  assert len(specs) == len(files.entries)
  experts = [entry for name, entry in files.entries.items() if ".experts." in name]
  assert len(experts) == 8 * cfg.num_experts * 3 * 2  # codes and scales
  assert {entry.dtype for entry in experts} == {"U8"}
  weights = 8 * cfg.num_experts * 3 * cfg.base_moe_mlp_dim * cfg.expert_input_dim
  assert sum(entry.nbytes for entry in experts) == weights // 2 + weights // BLOCK


def test_loaded_as_published_the_experts_stay_packed(model):
  assert model.config.packs_experts
  assert "random" not in model.weights


def test_held_out_source_takes_few_bits(model):
  nats = size = 0
  for name in HELD_OUT:
    text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text)
    ids = ids[len(ids) // 2 :][:LENGTH]
    nats -= log_probabilities(model, ids)[np.arange(len(ids) - 1), ids[1:]].sum()
    size += len(model.tokenizer.decode_bytes(ids[1:]))
  assert nats / math.log(2) / size < MOST_BITS_PER_BYTE


def test_the_readme_shows_the_greedy_answer(model):
  text = (Path(__file__).parents[1] / "README.md").read_text()
  (shown,) = re.findall(
    rf'prompt="{re.escape(PROMPT)}"\n```\n\nand prints\n\n```text\n(.*?)\n```', text, re.DOTALL
  )
  prompt, answer = model.tokenizer.encode(PROMPT), model.tokenizer.encode(shown)
  filler = [0] * (LENGTH - len(prompt + answer))  # behind the answer, where no token of it can look
  choices = model.logits(prompt + answer + filler)[len(prompt) - 1 : len(prompt + answer) - 1]
  assert model.tokenizer.decode(choices.argmax(axis=-1)) == shown
  assert len(answer) == loader.load_command("kimi-k3-tiny", [], DecodeOptions)[1].max_new_tokens
  best = np.sort(choices, axis=-1)
  assert (best[:, -1] - best[:, -2]).min() > LEAST_MARGIN
