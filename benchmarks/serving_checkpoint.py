"""The benchmark's checkpoint with one vocabulary in two forms: tiktoken.model, and tokenizer.json for mlx-lm.

The vocabulary has every byte and pairs of printable ASCII characters, so that nearly every id that random
weights pick is text, which both sides can send at once.
"""

import json
from itertools import islice, product
from pathlib import Path

from benchmarks.checkpoint import SHAPE, benchmark_checkpoint
from MaxText.tokenizers.vocabulary import CONFIG_FILE, NUM_SPECIALS, write_vocabulary

PRINTABLE = range(32, 127)
FILES = ("config.json", "model.safetensors")


def serving_checkpoints(workdir: Path) -> tuple[Path, Path]:
  """Returns two directories with the same weights, one for our server and one for mlx-lm's."""
  source = benchmark_checkpoint(workdir)
  ours, theirs = workdir / "serving" / "ours", workdir / "serving" / "mlx-lm"
  for directory in (ours, theirs):
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
      link = directory / name
      link.unlink(missing_ok=True)
      link.symlink_to((source / name).resolve())
  ranks = vocabulary(SHAPE["vocab_size"] - NUM_SPECIALS)
  write_vocabulary(ours, ranks)
  (theirs / "tokenizer.json").write_text(json.dumps(tokenizer_json(ranks, special_names(ours))))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  (theirs / CONFIG_FILE).write_text(json.dumps(config))
  return ours, theirs


def vocabulary(size: int) -> dict[bytes, int]:
  """Ranks of `size` tokens: the single bytes, then pairs of letters and spaces, then of other characters."""
  is_word = lambda byte: not (byte == 32 or 97 <= byte <= 122)
  ordered = sorted(PRINTABLE, key=is_word)
  pairs = (bytes(pair) for pair in product(ordered, repeat=2))
  tokens = [*(bytes([byte]) for byte in range(256)), *islice(pairs, size - 256)]
  return {token: rank for rank, token in enumerate(tokens)}


def tokenizer_json(ranks: dict[bytes, int], specials: dict[int, str]) -> dict:
  """The same tokens in the form of the tokenizers library: byte-level pairs, merged by rank."""
  letters = byte_letters()
  spell = lambda token: "".join(letters[byte] for byte in token)
  flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
  level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": number, "content": name, **flags} for number, name in sorted(specials.items())],
    "normalizer": None,
    "pre_tokenizer": level,
    "post_processor": None,
    "decoder": level,
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": False,
      "vocab": {spell(token): rank for token, rank in ranks.items()},
      "merges": [[letters[token[0]], letters[token[1]]] for token in ranks if len(token) == 2],
    },
  }


def byte_letters() -> dict[int, str]:
  """The visible letter that byte-level vocabularies write for each byte (GPT-2's table)."""
  visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
  hidden = [byte for byte in range(256) if byte not in visible]
  return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def special_names(directory: Path) -> dict[int, str]:
  """Returns the name of every special id, the reserved ones included, of a written vocabulary."""
  first = SHAPE["vocab_size"] - NUM_SPECIALS
  named = json.loads((directory / CONFIG_FILE).read_text())["added_tokens_decoder"]
  reserved = {number: f"<|reserved_token_{number}|>" for number in range(first, SHAPE["vocab_size"])}
  return reserved | {int(number): entry["content"] for number, entry in named.items()}
