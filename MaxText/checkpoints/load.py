"""Opens a checkpoint of either kind: a published directory, or an Orbax checkpoint of this package."""

import logging
from pathlib import Path
from typing import Any

from MaxText.checkpoints.accounting import APadding
from MaxText.checkpoints.directory import ORBAX_FILE, kind
from MaxText.checkpoints.published import load_published
from MaxText.checkpoints.reader import INDEX_FILE, SINGLE_FILE
from MaxText.checkpoints.report import Loaded
from MaxText.common.errors import CheckpointError
from MaxText.configs.schema import Config
from MaxText.models.kimi_k3 import KimiDecoder

_LOGGER = logging.getLogger("MaxText")


def load(
  directory: str | Path,
  cfg: Config,
  *,
  mesh_shardings: Any = None,
  progress: bool = True,
  a_log_padding: APadding = "auto",
) -> Loaded:
  """Loads a checkpoint into a decoder of `cfg`, scanned or unrolled as `cfg` says.

  Args:
    directory: a published directory or an Orbax checkpoint.
    cfg: the architecture, and the dtypes to hold. Experts are held packed only where all of them are stored
      packed, or count as rounded (`orbax_io`).
    mesh_shardings: what each parameter is split like, as in `placement.place_all`; only the slices that
      devices of this process hold are read.
    progress: draw a progress bar on a terminal.
    a_log_padding: what may stand behind the heads of a published `A_log`, as in `accounting.describe`.

  Raises:
    CheckpointError: no checkpoint there, damaged, incomplete, or of another architecture.
  """
  found = kind(directory)
  if found == "orbax":
    from MaxText.checkpoints.orbax_io import restore_orbax  # takes a second to import

    loaded = restore_orbax(directory, cfg, mesh_shardings=mesh_shardings, progress=progress)
  elif found is None and Path(directory).is_dir():
    wanted = f"{SINGLE_FILE}, {INDEX_FILE} (published) or {ORBAX_FILE} (Orbax)"
    raise CheckpointError(f"{directory}: no whole checkpoint: expected {wanted}")
  else:
    base = cfg.model_copy(update={"lora_rank": 0})  # a published directory has no adapters
    loaded = load_published(
      directory, base, mesh_shardings=mesh_shardings, progress=progress, a_log_padding=a_log_padding
    )
  _LOGGER.info("%s", loaded.report)
  return loaded


def load_params(
  directory: str | Path, cfg: Config, *, mesh_shardings: Any = None, progress: bool = True
) -> KimiDecoder:
  """Returns the decoder alone; arguments as in `load`."""
  return load(directory, cfg, mesh_shardings=mesh_shardings, progress=progress).model
