"""Which checkpoints of a training run are whole."""

from pathlib import Path


def whole_steps(checkpoints: Path) -> list[int]:
  """Returns the steps whose checkpoints in this folder are whole, the first one first.

  Orbax writes into a folder of another name and renames it to the step's number when the checkpoint is whole.
  """
  return sorted(int(folder.name) for folder in checkpoints.glob("*") if folder.name.isdigit())
