"""Imports maxtext's modules, and keeps what they print and log out of the way."""

import contextlib
import importlib
import io
import logging
import os
import sys
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


@contextlib.contextmanager
def one_complaint() -> Iterator[None]:
  """Keeps the other writes of a save that fails from a traceback each: what stopped the first is told.

  They end after the block, so that only a block without a failure puts everything back.
  """
  usual, logger = sys.unraisablehook, logging.getLogger("asyncio")
  keep = lambda record: "never retrieved" not in record.getMessage()
  logger.addFilter(keep)
  sys.unraisablehook = lambda late: None if "loop is closed" in str(late.exc_value) else usual(late)
  yield
  logger.removeFilter(keep)
  sys.unraisablehook = usual
