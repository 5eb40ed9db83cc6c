"""Which implementation of each operation a program was traced with, for the log and the summary line."""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

Choices = dict[str, set[str]]

_LOGGER = logging.getLogger("MaxText")
_LOGGED: set[tuple[str, str]] = set()
_COLLECTED: ContextVar[Choices | None] = ContextVar("choices", default=None)


@contextlib.contextmanager
def collect(into: Choices) -> Iterator[None]:
  """Adds what is traced in this thread, until the end of the block, to `into`: operation -> names."""
  token = _COLLECTED.set(into)
  try:
    yield
  finally:
    _COLLECTED.reset(token)


def record(op: str, impl: str) -> None:
  """Notes at trace time that `op` runs as `impl`, and logs each pair once in a process by name."""
  collected = _COLLECTED.get()
  if collected is not None:
    collected.setdefault(op, set()).add(impl)
  if (op, impl) not in _LOGGED:
    _LOGGED.add((op, impl))
    _LOGGER.info("%s runs as %s", op, impl)
