"""Imports maxtext's modules, and keeps what they print and log out of the way."""

import contextlib
import gc
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any


def maxtext_module(name: str) -> Any:
  """Imports `maxtext.name` without what it prints and logs while it looks for cloud packages."""
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  with contextlib.redirect_stdout(io.StringIO()):
    return importlib.import_module(f"maxtext.{name}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Keeps maxtext's prints from our stdout, and its notes of no consequence from the log."""
  loggers = [logging.getLogger(name) for name in ("absl", "maxtext")]
  levels = [logger.level for logger in loggers]
  try:
    for logger in loggers:
      logger.setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    for logger, level in zip(loggers, levels):
      logger.setLevel(level)


def causes(error: BaseException) -> list[BaseException]:
  """Returns an exception and what it was raised from or during, the last first."""
  found: list[BaseException] = []
  cause: BaseException | None = error
  while cause is not None and cause not in found:
    found.append(cause)
    cause = cause.__cause__ or cause.__context__
  return found


@contextlib.contextmanager
def one_complaint() -> Iterator[None]:
  """Keeps the other writes of a save that fails from a traceback each: what stopped the first is told.

  They have to end within the block, which puts everything back.
  """
  usual, loggers = sys.unraisablehook, [logging.getLogger(name) for name in ("absl", "asyncio")]
  late = ("was never retrieved", "raised an exception")
  keep = lambda record: not any(words in record.getMessage() for words in late)
  for logger in loggers:
    logger.addFilter(keep)
  sys.unraisablehook = lambda other: None if "loop is closed" in str(other.exc_value) else usual(other)
  try:
    yield
  except Exception as error:
    # a write that nobody asked for its outcome complains when it is collected: not later, at any time
    for cause in causes(error):
      traceback.clear_frames(cause.__traceback__)
    gc.collect()
    raise
  finally:
    for logger in loggers:
      logger.removeFilter(keep)
    sys.unraisablehook = usual
