"""The published vocabulary files: `tiktoken.model` (base ranks) and `tokenizer_config.json` (special tokens).

`tiktoken.model` has one line a token, `BASE64 RANK`; the rank is both the merge priority and the id. 256
special ids follow the last rank, 16 of them named: Kimi K3 has the ranks 0 to 163583 and the special ids
163584 to 163839. A smaller vocabulary of the same scheme has fewer ranks.

Source: spec section 1.5.
"""

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from MaxText.common.errors import CheckpointError, did_you_mean

VOCABULARY_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

# names that end an assistant's turn although tokenizer_config.json gives another eos_token (K3; Kimi-Linear)
TURN_ENDS = ("<|end_of_msg|>", "<|im_end|>")

NUM_SPECIALS = 256

# offset of a name from the first special id, and whether it is a control token that clean text leaves out
PUBLISHED_SPECIALS = {
  0: ("[BOS]", True),
  1: ("[EOS]", True),
  2: ("<|end_of_msg|>", True),
  3: ("<|open|>", False),
  4: ("<|close|>", False),
  5: ("<|sep|>", False),
  6: ("[start_header_id]", True),
  7: ("[end_header_id]", True),
  9: ("[EOT]", True),
  18: ("<|media_begin|>", True),
  19: ("<|media_content|>", True),
  20: ("<|media_end|>", True),
  21: ("<|media_pad|>", True),
  65: ("<osagent_mode>", True),
  254: ("[UNK]", True),
  255: ("[PAD]", True),
}


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
  """The ids after the base ranks.

  Attributes:
    ids: id of each name, for all the 256 ids after the ranks.
    markers: ids published with `special=false`: text decoded for a parser keeps them.
    stop_ids: ids that end a generated answer.
  """

  ids: Mapping[str, int]
  markers: frozenset[int]
  stop_ids: frozenset[int]


def read_ranks(path: Path) -> dict[bytes, int]:
  """Reads a `tiktoken.model`.

  Args:
    path: the file.

  Returns:
    Rank of each token; the ranks are exactly 0 .. n-1 and all 256 single bytes are among the tokens.

  Raises:
    CheckpointError: the file is missing, a line is malformed, or a token or rank is repeated or lacking.
  """
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(_read(path).splitlines(), start=1):
    if not line:
      continue
    try:
      encoded, digits = line.split()
      token, rank = base64.b64decode(encoded, validate=True), int(digits)
    except ValueError:
      raise CheckpointError(f"{path}:{number}: expected 'BASE64 RANK', got {line[:60]!r}") from None
    if token in ranks:
      raise CheckpointError(f"{path}:{number}: token {token!r} has rank {ranks[token]} already, got {rank}")
    ranks[token] = rank
  _check_ranks(ranks, path)
  return ranks


def _check_ranks(ranks: dict[bytes, int], path: Path) -> None:
  owner: dict[int, bytes] = {}
  for token, rank in ranks.items():
    if rank in owner:
      raise CheckpointError(f"{path}: rank {rank} is given to both {owner[rank]!r} and {token!r}")
    owner[rank] = token
  if lacking := set(range(len(ranks))) - owner.keys():
    raise CheckpointError(f"{path}: {len(ranks)} tokens, but no token has rank {min(lacking)}")
  if unspelled := [byte for byte in range(256) if bytes([byte]) not in ranks]:
    raise CheckpointError(f"{path}: no token for byte {unspelled[0]:#04x}; all 256 single bytes are needed")


def read_specials(path: Path, first_id: int) -> SpecialTokens:
  """Reads the special tokens of a `tokenizer_config.json`.

  Ids between the named ones get the published name `<|reserved_token_ID|>`.

  Args:
    path: the file.
    first_id: number of base ranks, which is the first special id.

  Returns:
    The special tokens of the ids `first_id` to `first_id + 255`.

  Raises:
    CheckpointError: the file is missing or not such a file, or a name or id cannot be used.
  """
  config = read_json(path)
  try:
    added = {
      int(key): (entry["content"], entry["special"]) for key, entry in config["added_tokens_decoder"].items()
    }
  except (KeyError, TypeError, ValueError, AttributeError):
    raise CheckpointError(f"{path}: expected added_tokens_decoder = {{id: {{content, special}}}}") from None
  special_ids = range(first_id, first_id + NUM_SPECIALS)
  if foreign := added.keys() - set(special_ids):
    raise CheckpointError(
      f"{path}: special ids follow the {first_id} base ranks, "
      f"expected {special_ids[0]} to {special_ids[-1]}, got {min(foreign)}"
    )
  ids: dict[str, int] = {}
  for token_id in special_ids:
    name = added.get(token_id, (f"<|reserved_token_{token_id}|>", True))[0]
    if name in ids:
      raise CheckpointError(f"{path}: {name!r} names both id {ids[name]} and id {token_id}")
    ids[name] = token_id
  markers = frozenset(token_id for token_id, (_, special) in added.items() if not special)
  return SpecialTokens(ids, markers, _stop_ids(config, ids, path))


def _stop_ids(config: Mapping[str, Any], ids: Mapping[str, int], path: Path) -> frozenset[int]:
  eos = config.get("eos_token")
  eos = eos.get("content") if isinstance(eos, dict) else eos
  if eos is not None and eos not in ids:
    hint = did_you_mean(eos, ids)
    raise CheckpointError(f"{path}: eos_token {eos!r} is not in added_tokens_decoder{hint}")
  return frozenset(ids[name] for name in (eos, *TURN_ENDS) if name in ids)


def write_vocabulary(directory: Path, ranks: Mapping[bytes, int]) -> None:
  """Writes both files, with the published special names at their published offsets after the ranks.

  Args:
    directory: made when it does not exist.
    ranks: rank of each token, 0 .. n-1.
  """
  directory.mkdir(parents=True, exist_ok=True)
  lines = (
    f"{base64.b64encode(token).decode()} {rank}\n"
    for token, rank in sorted(ranks.items(), key=lambda x: x[1])
  )
  (directory / VOCABULARY_FILE).write_text("".join(lines))
  flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
  added = {
    str(len(ranks) + offset): {"content": name, **flags, "special": special}
    for offset, (name, special) in PUBLISHED_SPECIALS.items()
  }
  config = {
    "added_tokens_decoder": added,
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "pad_token": "[PAD]",
    "tokenizer_class": "TikTokenTokenizer",
    "unk_token": "[UNK]",
  }
  (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object, or raises a `CheckpointError` that names the file and the place."""
  try:
    value = json.loads(_read(path))
  except ValueError as error:  # broken JSON or broken UTF-8
    raise CheckpointError(f"{path}: not JSON: {error}") from None
  if not isinstance(value, dict):
    raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
  return value


def _read(path: Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
