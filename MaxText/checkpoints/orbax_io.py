"""Saves and restores a decoder's tree with Orbax.

The tree is stored as the model holds it, scanned or unrolled; a model of the other layout is restacked on the
host. Experts that were trained through the MXFP4 grid are stored as the optimizer left them and restored on
the grid, as the forward pass of that training used them; only more of it gets them as they are stored.

Beside the arrays lie config.json, the tokenizer files, and one JSON file, written last, that says how the
tree is laid out and how a published source stored its tensors.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from MaxText.checkpoints.directory import (
  LORA_KEYS,
  ORBAX_FILE,
  RUN_FILE,
  RUN_PREFIXES,
  read_orbax_file,
  run_checkpoint,
  write_companions,
  write_orbax_file,
)
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.manifest import Manifest
from MaxText.checkpoints.placement import place_all, sharding_by_path
from MaxText.checkpoints.published import stored_experts
from MaxText.checkpoints.reader import read_json
from MaxText.checkpoints.report import Loaded, LoadReport, held_by_dtype
from MaxText.checkpoints.restack import Restacker, nbytes, pieces
from MaxText.checkpoints.staging import staged
from MaxText.common.errors import CheckpointError
from MaxText.configs.comparison import architecture_differences
from MaxText.configs.published import from_published
from MaxText.configs.schema import Config
from MaxText.models import registry
from MaxText.models.adapters import adapts_experts, merged
from MaxText.models.kimi_k3 import KimiDecoder

_ARRAYS = "params"


def save_orbax(
  model: KimiDecoder,
  directory: str | Path,
  *,
  manifest: Manifest | None = None,
  companions: str | Path | None = None,
  overwrite: bool = False,
) -> None:
  """Saves the parameters of `model` and its configuration; the directory appears whole or not at all.

  Args:
    model: scanned or unrolled, in any dtypes; what adapters add is folded into its weights.
    directory: absent or empty, unless `overwrite`.
    manifest: how a published source stored its tensors, so that a later export restores its bytes.
    companions: directory to copy tokenizer and generation files from.
    overwrite: replace what `directory` holds.

  Raises:
    CheckpointError: `directory` holds something, or cannot be written.
  """
  tree, cfg = ParameterTree(merged(model)), model.cfg
  with staged(directory, overwrite, sum(array.nbytes for array in tree.values.values())) as folder:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
      checkpointer.save(folder / _ARRAYS, args=ocp.args.StandardSave(_nested(tree.values)))
    write_companions(folder, cfg, companions)
    source = manifest and json.loads(manifest.to_json())
    write_orbax_file(
      folder, ORBAX_FILE, cfg.model_copy(update={"scan_layers": bool(model.plan.repeats)}), source
    )


def restore_orbax(
  directory: str | Path, cfg: Config, *, mesh_shardings: Any = None, progress: bool = True
) -> Loaded:
  """Restores a decoder of `cfg`, whatever layout the checkpoint was saved in; arguments as in `load.load`.

  Args:
    directory: from `save_orbax`; or a training run, for its last checkpoint, or one of its checkpoints.
    cfg: the architecture and the dtypes to hold. Experts that count as rounded are held packed or rounded;
      with `mxfp4_qat` they are held as they are stored, to be trained on.
    mesh_shardings: as in `load.load`.
    progress: as in `load.load`.

  Raises:
    CheckpointError: not a whole checkpoint of this package, or of another architecture.
  """
  started = time.monotonic()
  directory = Path(directory).resolve()
  run = run_checkpoint(directory)
  home, arrays_at, prefixes = (*run, RUN_PREFIXES) if run else (directory, directory / _ARRAYS, ("",))
  stored_cfg, manifest = _read_about(home, cfg, RUN_FILE if run else ORBAX_FILE)
  stored = ParameterTree(registry.abstract(stored_cfg))
  rounds = _rounds(stored_cfg, cfg)
  # adapters merge into plain experts only
  cfg = stored_experts(cfg, stored_cfg.packs_experts or (rounds and not adapts_experts(stored.values)))
  cfg = cfg.model_copy(
    update={key: getattr(stored_cfg, key) for key in LORA_KEYS}
  )  # adapters are part of a run
  tree = ParameterTree(registry.abstract(cfg))
  if callable(mesh_shardings):
    mesh_shardings = mesh_shardings(tree.model)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    archive = _Archive(arrays_at, checkpointer, prefixes)
    archive.check(stored)
    if archive.same_shapes(tree) and not rounds:
      arrays = archive.restore(tree, mesh_shardings)
    else:
      restacker = Restacker(archive.read, archive.shapes, pieces(tree, stored, rounds), tree.values)
      arrays = place_all(restacker.shapes, restacker, mesh_shardings, progress)
  held, seconds = held_by_dtype(arrays.values()), time.monotonic() - started
  report = LoadReport(str(directory), archive.bytes_by_dtype(), held, len(archive.shapes), (), seconds)
  return Loaded(tree.merge(arrays), report, manifest)


def _rounds(stored: Config, cfg: Config) -> bool:
  """Whether a checkpoint's plain experts are rounded to MXFP4 where a model of `cfg` is made from it.

  A model that rounds them in each forward pass takes them as they are, unless adapters become part of what
  they were trained on: that was rounded.
  """
  drops_adapters = bool(stored.lora_rank) and not cfg.lora_rank
  return stored.mxfp4_qat and (drops_adapters or not cfg.mxfp4_qat)


class _Archive:
  """The stored arrays by dotted path.

  Attributes:
    shapes: path -> shape and dtype of every stored array of the model.
  """

  def __init__(self, directory: Path, checkpointer: ocp.Checkpointer, prefixes: Sequence[str] = ("",)):
    """Reads what is stored below `prefixes`; beside them a training run stores its optimizer's state."""
    self._directory, self._checkpointer = directory, checkpointer
    try:
      with _quiet():
        metadata = checkpointer.metadata(directory).item_metadata.tree
    except (OSError, ValueError, AttributeError) as error:
      raise _unreadable(directory, error) from error
    self.shapes, self._stored = {}, {}
    for stored, array in _flat(metadata).items():
      for prefix in filter(stored.startswith, prefixes):
        path = stored.removeprefix(prefix)
        self.shapes[path] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        self._stored[path] = stored

  def check(self, expected: ParameterTree) -> None:
    """Compares with the tree that the configuration promises.

    Raises:
      CheckpointError: an array is missing, unknown or of another shape.
    """
    want = {path: value.shape for path, value in expected.values.items()}
    have = {path: value.shape for path, value in self.shapes.items()}
    for path in (*want, *have):
      if want.get(path) != have.get(path):
        raise CheckpointError(f"{self._directory}: {path}: expected {want.get(path)}, got {have.get(path)}")

  def same_shapes(self, tree: ParameterTree) -> bool:
    """Whether `tree` is laid out as the archive is."""
    shapes = {path: value.shape for path, value in self.shapes.items()}
    return shapes == {path: value.shape for path, value in tree.values.items()}

  def restore(self, tree: ParameterTree, mesh_shardings: Any) -> dict[str, jax.Array]:
    """Restores every array in the dtype of `tree`, reading only what devices of this process hold."""
    shardings = sharding_by_path(mesh_shardings)
    whole = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    args = {
      path: ocp.ArrayRestoreArgs(dtype=value.dtype, sharding=shardings.get(path, whole))
      for path, value in tree.values.items()
    }
    return self._restore(args)

  def read(self, paths: list[str]) -> dict[str, np.ndarray]:
    """Returns some of the arrays on the host."""
    return self._restore(dict.fromkeys(paths, ocp.RestoreArgs(restore_type=np.ndarray)))

  def _restore(self, args: dict[str, ocp.RestoreArgs]) -> dict[str, Any]:
    stored = {self._stored[path]: value for path, value in args.items()}
    item = _nested(dict.fromkeys(stored, 0))
    restore = ocp.args.PyTreeRestore(item=item, restore_args=_nested(stored), partial_restore=True)
    try:
      arrays = _flat(self._checkpointer.restore(self._directory, args=restore))
    except (OSError, ValueError) as error:
      raise _unreadable(self._directory, error) from error
    return {path: arrays[self._stored[path]] for path in args}

  def bytes_by_dtype(self) -> dict[str, int]:
    """Sums the stored bytes by dtype."""
    totals: Counter = Counter()
    for value in self.shapes.values():
      totals[str(value.dtype)] += nbytes(value)
    return dict(totals)


@contextmanager
def _quiet() -> Iterator[None]:
  """Keeps Orbax from warning that a part of a training run's checkpoint has no metadata of its own."""
  logger = logging.getLogger("absl")
  level = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(level)


def _unreadable(directory: Path, error: Exception) -> CheckpointError:
  first_line = str(error).partition("\n")[0]
  return CheckpointError(f"{directory}: unreadable as an Orbax checkpoint: {first_line[:300]}")


def _read_about(directory: Path, cfg: Config, name: str) -> tuple[Config, Manifest | None]:
  """Returns the configuration that the tree was saved under, and the manifest of its published source."""
  about = read_orbax_file(directory, name)
  stored = from_published(read_json(directory / "config.json"), str(directory / "config.json"))
  differing = [
    f"{key} {theirs} in the checkpoint, {ours} in {cfg.model_name}"
    for key, theirs, ours in architecture_differences(stored, cfg)
  ]
  if differing:
    raise CheckpointError(f"{directory}: checkpoint of another architecture: {'; '.join(differing[:5])}")
  manifest = about["manifest"] and Manifest.from_json(json.dumps(about["manifest"]))
  layout = {key: tuple(value) if isinstance(value, list) else value for key, value in about["layout"].items()}
  return stored.model_copy(update={"lora_rank": 0} | layout), manifest


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
  """Returns the tree of dictionaries whose dotted paths are the keys of `flat`."""
  tree: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, name = path.split(".")
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = value
  return tree


def _flat(tree: dict[str, Any], parent: str = "") -> dict[str, Any]:
  found: dict[str, Any] = {}
  for name, value in tree.items():
    path = f"{parent}{name}"
    found |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
  return found
