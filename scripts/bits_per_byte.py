"""Held-out bits per byte of a checkpoint, and of a byte-level 5-gram model fitted on the same training text.

    python scripts/bits_per_byte.py [DIRECTORY]      default: the bundled kimi-k3-tiny

The text is the installed standard library's source, split as `MaxText.tokenizers.training` splits it. The
5-gram is interpolated modified Kneser-Ney over the 256 bytes and an end of document.

Dims: N rows or n-grams, B of a batch, T tokens of a row. Source: Chen and Goodman, "An empirical study of
smoothing techniques for language modeling" (TR-10-98), section 3 and eq. 26.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import MaxText
from MaxText.checkpoints.load import load_params
from MaxText.common import command
from MaxText.configs import loader
from MaxText.configs.schema import Config
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.registry import load_tokenizer
from MaxText.tokenizers.training import standard_library

TINY = Path(MaxText.__file__).parent / "assets" / "kimi-k3-tiny"
LENGTH, BATCH = 512, 8
END = 256  # the symbol behind the last byte of a document, and the padding before its first
SYMBOLS = 257


# --- a decoder ----------------------------------------------------------------------------------------------


def rows(texts: Iterable[str], tokenizer: KimiTokenizer, end: int) -> tuple[np.ndarray, np.ndarray]:
  """Packs documents, each closed by the id `end`, into ids and document numbers, both [N, T+1]."""
  documents = [np.array([*tokenizer.encode(text), end], np.int32) for text in texts]
  ids = np.concatenate(documents)
  segments = np.repeat(np.arange(1, len(documents) + 1, dtype=np.int32), [len(d) for d in documents])
  at = np.arange((len(ids) - 1) // LENGTH)[:, None] * LENGTH + np.arange(LENGTH + 1)
  return ids[at], segments[at]


def token_losses(decoder: nnx.Module, ids: jax.Array, segments: jax.Array) -> jax.Array:
  """Returns -log p [B, T] of each next token in nats; a token that begins a document counts 0."""
  logits, _ = decoder(ids[:, :-1], None, segments[:, :-1])
  picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)[..., 0]
  return jnp.where(segments[:, 1:] == segments[:, :-1], -picked, 0)


def decoder_bits(decoder: nnx.Module, cfg: Config, texts: Sequence[str], tokenizer: KimiTokenizer) -> float:
  """Measures -log2 p of `texts` a byte, in rows of T tokens that each start from nothing."""
  ids, segments = rows(texts, tokenizer, cfg.eos_token_id)
  graph, values = nnx.split(decoder)
  losses = jax.jit(lambda values, i, s: token_losses(nnx.merge(graph, values), i, s))
  sizes = np.array([len(tokenizer.decode_bytes([token])) for token in range(cfg.eos_token_id)] + [0])
  inside = segments[:, 1:] == segments[:, :-1]
  nats = size = 0
  starts = range(0, len(ids) - len(ids) % BATCH, BATCH)
  for start in tqdm(starts, desc="decoder", disable=not sys.stderr.isatty()):
    batch = slice(start, start + BATCH)
    nats += float(losses(values, ids[batch], segments[batch]).sum())
    size += int((sizes[ids[batch, 1:]] * inside[batch]).sum())
  return nats / math.log(2) / size


# --- the 5-gram ---------------------------------------------------------------------------------------------


class Level(NamedTuple):
  """Smoothed counts of one order m of n-grams.

  Attributes:
    grams: [N] codes of the known m-grams, sorted.
    share: [N] discounted count of each over the count of its context.
    contexts: [C] codes of the known contexts of m-1 symbols, sorted.
    rest: [C] probability that each context leaves to the order below.
  """

  grams: np.ndarray
  share: np.ndarray
  contexts: np.ndarray
  rest: np.ndarray


def codes(texts: Iterable[str], order: int) -> np.ndarray:
  """Returns [N] int64 codes of the n-grams that end in each byte, and in the end, of each document."""
  every = []
  for text in texts:
    symbols = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    symbols = np.concatenate([np.full(order - 1, END), symbols, [END]])
    size = len(symbols) - order + 1
    every.append(sum(symbols[i : i + size] * SYMBOLS ** (order - 1 - i) for i in range(order)))
  return np.concatenate(every)


def fit(texts: Iterable[str], order: int = 5) -> list[Level]:
  """Counts and smooths all orders, the highest last; the others count the symbols that precede a gram."""
  grams, counts = np.unique(codes(texts, order), return_counts=True)
  levels = []
  for size in range(order, 0, -1):
    levels.insert(0, _level(grams, counts))
    grams, counts = np.unique(grams % SYMBOLS ** (size - 1), return_counts=True)
  return levels


def _level(grams: np.ndarray, counts: np.ndarray) -> Level:
  of = [max(int((counts == k).sum()), 1) for k in range(1, 5)]
  y = of[0] / (of[0] + 2 * of[1])
  discounts = np.array([0.0, *(k - (k + 1) * y * of[k] / of[k - 1] for k in (1, 2, 3))]).clip(0, None)
  removed = np.minimum(discounts[np.minimum(counts, 3)], counts)
  contexts, place = np.unique(grams // SYMBOLS, return_inverse=True)
  total = np.bincount(place, counts)
  return Level(grams, (counts - removed) / total[place], contexts, np.bincount(place, removed) / total)


def probabilities(levels: Sequence[Level], grams: np.ndarray) -> np.ndarray:
  """Returns [N] probability of the last symbol of each n-gram [N] given the symbols before it."""
  p = np.full(len(grams), 1 / SYMBOLS)
  for size, level in enumerate(levels, 1):
    tail = grams % SYMBOLS**size
    p = _lookup(level.grams, level.share, tail, 0.0) + p * _lookup(
      level.contexts, level.rest, tail // SYMBOLS, 1.0
    )
  return p


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, default: float) -> np.ndarray:
  at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[at] == wanted, values[at], default)


def ngram_bits(training: Iterable[str], held_out: Sequence[str], order: int = 5) -> float:
  """Measures -log2 p of `held_out` a byte under the n-gram model of `training`."""
  p = probabilities(fit(training, order), codes(held_out, order))
  return float(-np.log2(p).sum()) / sum(len(text.encode()) for text in held_out)


# --- the command --------------------------------------------------------------------------------------------


def measure(arguments: Sequence[str]) -> int:
  """Prints both figures; returns 0 when the decoder is the better of the two."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument(
    "directory", type=Path, nargs="?", default=TINY, help="a published checkpoint directory"
  )
  directory = parser.parse_args(arguments).directory
  cfg = loader.load(directory)
  tokenizer = load_tokenizer(directory, cfg.vocab_size)
  training, held_out = standard_library()
  ngram = ngram_bits(training, held_out)
  print(f"byte-level 5-gram: {ngram:.4f} bits per byte on {len(held_out)} held-out files", flush=True)
  decoder = decoder_bits(load_params(directory, cfg), cfg, held_out, tokenizer)
  print(f"{directory}: {decoder:.4f} bits per byte")
  return 0 if decoder < ngram else 1


if __name__ == "__main__":
  sys.exit(command.run(measure, None))
