"""Strict accounting: every tensor of a file is used once, every expected one is there, each has its shape.

Source: docs/architecture.md; spec 9-D7 (A_log), 9-D14 (which tensors are packed).
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from MaxText.checkpoints.manifest import Manifest, differences
from MaxText.checkpoints.names import PREFIXES, U8, TensorSpec, accepts, expected_tensors
from MaxText.checkpoints.reader import PublishedFiles
from MaxText.common.errors import CheckpointError, did_you_mean
from MaxText.configs.schema import Config

_LOGGER = logging.getLogger("MaxText")
_NAMED = 5  # tensors that a message names before it counts the rest
_LANES = 128  # the release pads A_log to one row of lanes

APadding = Literal["auto", "zeros", "any"]


def match(files: PublishedFiles, cfg: Config) -> tuple[str, list[TensorSpec]]:
  """Pairs every text tensor of `files` with its row of the table.

  Returns:
    The decoder prefix in use, and the specs, one for each text tensor.

  Raises:
    CheckpointError: tensors missing, unknown, of another shape or type than `cfg` expects; all are counted,
      the first few named.
  """
  prefix = find_prefix(files)
  specs = {
    spec.name: spec for spec in expected_tensors(cfg, prefix, lambda stem: _is_packed(files, cfg, stem))
  }
  missing = [name for name in specs if name not in files.entries]
  unknown = [name for name in files.entries if name not in specs]
  wrong = [text for spec in specs.values() if (text := _mismatch(files, cfg, spec))]
  problems = [
    _listing(missing, "missing", unknown),
    _listing(unknown, "unknown", missing),
    _listing(wrong, "of another form", ()),
  ]
  if any(problems):
    raise CheckpointError(
      f"{files.directory}: does not fit {cfg.model_name}: {'; '.join(filter(None, problems))}"
    )
  return prefix, list(specs.values())


def describe(
  files: PublishedFiles, cfg: Config, prefix: str, specs: list[TensorSpec], a_log_padding: APadding = "auto"
) -> Manifest:
  """Records how `files` are stored, for an export that restores their bytes.

  Args:
    files: the checkpoint.
    cfg: its architecture.
    prefix: from `match`.
    specs: from `match`.
    a_log_padding: what may stand behind the live heads of `A_log`. The release stores a row of 128 with zeros
      behind the 96 heads, and anything else there means that heads are read wrongly: "zeros"
      insists on it, "any" keeps other bytes with a warning. "auto" insists where the row is a multiple of
      128, as released, and keeps the tail of any other width, which follows no published rule (small test
      checkpoints fill the whole row).

  Raises:
    CheckpointError: padding that has to be zero is not.
  """
  stems = {spec.name.removesuffix(".weight_packed") for spec in specs if spec.name.endswith(".weight_packed")}
  if cfg.expert_quantization == "mxfp4":
    plain = (
      spec.name.removesuffix(".weight") for spec in specs if ".experts." in spec.name and spec.dtype != U8
    )
    stems = set(plain)
  tails = {name: tail.hex() for name, tail in _tails(files, cfg, specs, a_log_padding)}
  if tails:
    _LOGGER.warning("%s: A_log is not zero behind its heads in %d layers", files.directory, len(tails))
  return Manifest(prefix, differences(specs, files.entries), tails, frozenset(stems), files.metadata)


def find_prefix(files: PublishedFiles) -> str:
  """Returns what stands before the decoder's tensors (spec 3).

  Raises:
    CheckpointError: no tensor carries a known prefix.
  """
  for prefix in PREFIXES:
    if f"{prefix}embed_tokens.weight" in files.entries:
      return prefix
  for prefix in PREFIXES:
    if any(name.startswith(f"{prefix}layers.") for name in files.entries):
      return prefix
  found = ", ".join(list(files.entries)[:_NAMED]) or "no text tensors"
  expected = " or ".join(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
  raise CheckpointError(f"{files.directory}: no decoder tensors: expected {expected}, got {found}")


def _is_packed(files: PublishedFiles, cfg: Config, stem: str) -> bool:
  if f"{stem}.weight_packed" in files.entries:
    return True
  return f"{stem}.weight" not in files.entries and cfg.expert_quantization == "mxfp4"


def _mismatch(files: PublishedFiles, cfg: Config, spec: TensorSpec) -> str | None:
  entry = files.entries.get(spec.name)
  if entry is None:
    return None
  if not accepts(spec, entry.shape, cfg):
    return f"{spec.name} (expected {list(spec.shape)}, got {list(entry.shape)})"
  if (entry.dtype == U8) != (spec.dtype == U8):
    return f"{spec.name} (expected {spec.dtype}, got {entry.dtype})"
  return None


def _listing(names: list[str], what: str, candidates: Iterable[str]) -> str:
  if not names:
    return ""
  near = did_you_mean(names[0], list(candidates)[:1000])
  rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
  return f"{len(names)} {what}: {', '.join(names[:_NAMED])}{rest}{near}"


def _tails(
  files: PublishedFiles, cfg: Config, specs: list[TensorSpec], rule: APadding
) -> Iterator[tuple[str, bytes]]:
  """Yields (name, bytes) of every A_log whose padding is not plain zeros."""
  for spec in specs:
    entry = files.entries[spec.name]
    width = int(np.prod(entry.shape))
    if spec.places[0].view != "heads" or width == cfg.kda_num_heads:
      continue
    tail = files.array(spec.name).reshape(-1)[cfg.kda_num_heads :]
    must_be_zero = rule == "zeros" or (rule == "auto" and width % _LANES == 0)
    if must_be_zero and np.count_nonzero(tail):
      raise CheckpointError(
        f"{files.directory}: {spec.name}: {cfg.kda_num_heads} heads stand in [{width}], but "
        f"{np.count_nonzero(tail)} of the {len(tail)} values behind them are not zero"
      )
    if any(tail.tobytes()):
      yield spec.name, tail.tobytes()
