"""Saves and restores low-rank adapters alone: one safetensors file with a JSON header.

Tensors are named by their layers' numbers (`layers.3.self_attn.q_proj.lora.a`), so that a file fits a scanned
and an unrolled decoder alike. The header says rank, alpha, targets and the architecture that they belong to.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from MaxText.checkpoints.directory import LORA_KEYS
from MaxText.checkpoints.layout import ParameterTree
from MaxText.common.errors import CheckpointError
from MaxText.configs.comparison import architecture_differences
from MaxText.configs.published import from_published, to_published
from MaxText.configs.schema import Config
from MaxText.layers.lora import LoRAParam
from MaxText.models import adapters
from MaxText.models.kimi_k3 import KimiDecoder

_FORMAT = "maxtext-kimi-lora-1"


def save_adapters(decoder: KimiDecoder, cfg: Config, path: str | Path) -> None:
  """Writes the adapters of `decoder`, and nothing else; the file appears whole or not at all.

  Args:
    decoder: scanned or unrolled, with adapters.
    cfg: what the adapters were attached with.
    path: of the file; an older one is replaced.

  Raises:
    CheckpointError: no adapters, or the file cannot be written.
  """
  path = Path(path)
  tensors = {name: np.asarray(value) for name, value in _shares(decoder).items()}
  if not tensors:
    raise CheckpointError(f"{path}: this decoder has no adapters to save")
  about = {key: getattr(cfg, key) for key in LORA_KEYS} | {"config": to_published(cfg)}
  partial = path.with_name(f"{path.name}.partial")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial, metadata={"format": _FORMAT, "about": json.dumps(about)})
    os.replace(partial, path)
  except OSError as failure:
    partial.unlink(missing_ok=True)
    raise CheckpointError(f"{path}: cannot be written ({failure.strerror or failure})") from None


def load_adapters(decoder: KimiDecoder, path: str | Path) -> Config:
  """Attaches the adapters of a file to `decoder`, in place.

  Args:
    decoder: scanned or unrolled; adapters that it already has must be those of the file.
    path: what `save_adapters` wrote.

  Returns:
    the decoder's configuration with the adapter keys of the file.

  Raises:
    CheckpointError: unreadable, of another architecture, or other tensors than the header promises.
  """
  tensors, about = _read(Path(path))
  stored = from_published(about["config"], str(path))
  if differing := architecture_differences(stored, decoder.cfg):
    named = "; ".join(f"{key} {theirs} there, {ours} here" for key, theirs, ours in differing[:4])
    raise CheckpointError(f"{path}: adapters of another architecture: {named}")
  keys = {key: tuple(about[key]) if key == "lora_targets" else about[key] for key in LORA_KEYS}
  cfg = decoder.cfg.model_copy(update=keys)
  if not adapters.has_adapters(decoder):
    adapters.attach(decoder, cfg, nnx.Rngs(0))
  expected = {name: value.shape for name, value in _shares(decoder).items()}
  for name in (*expected, *tensors):
    found = tensors[name].shape if name in tensors else None
    if expected.get(name) != found:
      raise CheckpointError(f"{path}: {name}: expected {expected.get(name)}, got {found}")
  _fill(decoder, tensors)
  return cfg


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  if not path.is_file():
    raise CheckpointError(f"{path}: no such adapter file")
  try:
    with safe_open(path, framework="numpy") as file:
      metadata = file.metadata() or {}
      tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
  except (OSError, SafetensorError) as failure:
    raise CheckpointError(f"{path}: unreadable as safetensors: {failure}") from None
  if metadata.get("format") != _FORMAT:
    raise CheckpointError(f"{path}: format {metadata.get('format')!r}, expected {_FORMAT!r}")
  return tensors, json.loads(metadata["about"])


def _adapter_paths(decoder: KimiDecoder) -> set[str]:
  return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(decoder, LoRAParam))}


def _shares(decoder: KimiDecoder) -> dict[str, Any]:
  """Name with the layer's number -> that layer's share of each adapter array."""
  tree, mine = ParameterTree(decoder), _adapter_paths(decoder)
  return {name: tree.values[path][row or ...] for name, path, row in tree.numbered() if path in mine}


def _fill(decoder: KimiDecoder, tensors: dict[str, np.ndarray]) -> None:
  tree, mine = ParameterTree(decoder), _adapter_paths(decoder)
  rows: dict[str, list[np.ndarray]] = {}
  for name, path, row in tree.numbered():
    if path in mine:
      rows.setdefault(path, []).append(tensors[name] if not row else tensors[name][None])
  state = nnx.state(decoder, LoRAParam)
  for path, variable in nnx.to_flat_state(state):
    values = np.concatenate(found) if (found := rows[".".join(map(str, path))])[1:] else found[0]
    variable.set_value(jnp.asarray(values, variable[...].dtype))
  nnx.update(decoder, state)
