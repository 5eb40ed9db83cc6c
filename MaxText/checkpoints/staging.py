"""Writes a directory so that it appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from MaxText.checkpoints.directory import kind
from MaxText.common.errors import CheckpointError


@contextmanager
def staged(target: str | Path, overwrite: bool, needed: int) -> Iterator[Path]:
  """Gives a new directory beside `target` to write into; it takes the target's name when the block ends well.

  Args:
    target: where the result shall lie; absent, or an empty directory.
    overwrite: replace a directory that holds something.
    needed: bytes that will be written, checked against the free space before the first of them.

  Raises:
    CheckpointError: `target` is a file, holds something and may not be overwritten, or cannot be written.
  """
  target = Path(target).resolve()  # of a link the directory is replaced, not the link
  check_writable(target, overwrite)
  partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    free = shutil.disk_usage(partial).free
    if free < needed:
      raise CheckpointError(f"{target}: needs {needed:,} bytes of disk, {free:,} are free")
    yield partial
    _replace(partial, target)
  except OSError as error:
    raise CheckpointError(f"{target}: cannot be written: {error}") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def check_writable(target: Path, overwrite: bool = False) -> None:
  """Refuses a target that would lose something, before any work is done.

  Raises:
    CheckpointError: `target` is a file, or holds something and may not be overwritten.
  """
  if target.exists() and not target.is_dir():
    raise CheckpointError(f"{target}: is a file, expected a directory or nothing")
  if target.is_dir() and any(target.iterdir()) and not overwrite:
    raise CheckpointError(f"{target}: is not empty; give overwrite=true to replace it")
  if target.is_dir() and any(target.iterdir()) and kind(target) is None:
    raise CheckpointError(
      f"{target}: holds no checkpoint, so overwrite=true does not replace it; empty it first"
    )


def _replace(partial: Path, target: Path) -> None:
  if not target.exists():
    partial.rename(target)
    return
  old = target.with_name(f".{target.name}.old-{os.getpid()}")
  target.rename(old)
  try:
    partial.rename(target)
  except OSError:
    old.rename(target)
    raise
  shutil.rmtree(old)
