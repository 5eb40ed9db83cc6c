"""Small published checkpoints to read, damage and write, and byte-for-byte comparison."""

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy  # noqa: F401 - registers bfloat16 with NumPy, which the safetensors library asks for by name
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from MaxText.checkpoints.layout import ParameterTree
from MaxText.configs.loader import load as load_config
from MaxText.configs.schema import Config
from MaxText.models.kimi_k3 import KimiDecoder
from tests.locations import ORACLE
from tests.reference.generator import k3_config_json, kimi_linear_config_json, write_checkpoint

# one dense layer, two cycles of (KDA, MLA) that scan, and a second MLA behind them
SHAPE = {"num_hidden_layers": 6, "full_attn_layers": (3, 5, 6)}
K3 = k3_config_json(**SHAPE, num_experts=4)
KIMI_LINEAR = kimi_linear_config_json(**SHAPE, num_experts=4)


def write_k3(directory: Path, **options) -> Path:
  """A small Kimi K3 of seed 5; options as of the generator."""
  return write_checkpoint(directory, K3, 5, **options)


def write_kimi_linear(directory: Path, **options) -> Path:
  """A small Kimi-Linear of seed 6; options as of the generator."""
  return write_checkpoint(directory, KIMI_LINEAR, 6, **options)


def oracle() -> Path:
  """The fixture with Moonshot's names; skips where it is not beside the checkout."""
  if not ORACLE.is_dir():
    pytest.skip(f"the oracle checkpoint is not at {ORACLE}")
  return ORACLE


def config_of(directory: Path, *overrides: str, **ours) -> Config:
  """The configuration that a checkpoint directory states."""
  return load_config(directory, list(overrides)).model_copy(update=ours)


def tensors(directory: Path) -> dict[str, np.ndarray]:
  """Every tensor of a published directory, read by the safetensors library."""
  return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def edit(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
  """Rewrites the only file of a published directory after `change` to its tensors."""
  found = {name: np.array(tensor) for name, tensor in tensors(directory).items()}
  change(found)
  save_file(found, directory / "model.safetensors")


def edit_config(directory: Path, **text_keys) -> None:
  """Changes keys of the decoder's part of config.json."""
  content = json.loads((directory / "config.json").read_text())
  content.get("text_config", content).update(text_keys)
  (directory / "config.json").write_text(json.dumps(content))


def assert_same_tensors(ours: Path, theirs: Path, without: tuple[str, ...] = ()) -> None:
  """Same names, types, shapes and bytes, apart from names that begin with one of `without`."""
  got, want = tensors(ours), tensors(theirs)
  assert sorted(got) == sorted(name for name in want if not name.startswith(without or ("\0",)))
  for name, tensor in got.items():
    assert (tensor.dtype, tensor.shape) == (want[name].dtype, want[name].shape), name
    assert tensor.tobytes() == want[name].tobytes(), name


def assert_same_models(ours: KimiDecoder, theirs: KimiDecoder) -> None:
  """Same parameters, bit for bit."""
  got, want = ParameterTree(ours).values, ParameterTree(theirs).values
  assert sorted(got) == sorted(want)
  for path, array in got.items():
    assert (array.dtype, array.shape) == (want[path].dtype, want[path].shape), path
    assert np.asarray(array).tobytes() == np.asarray(want[path]).tobytes(), path
