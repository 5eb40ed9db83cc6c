"""Which implementation of each operation a program was traced with, for the log and the summary line."""

import logging

_LOGGER = logging.getLogger("MaxText")
_CHOSEN: dict[str, set[str]] = {}


def record(op: str, impl: str) -> None:
  """Notes at trace time that `op` runs as `impl`, and logs each pair once by name."""
  seen = _CHOSEN.setdefault(op, set())
  if impl not in seen:
    seen.add(impl)
    _LOGGER.info("%s runs as %s", op, impl)


def chosen() -> dict[str, str]:
  """Returns operation -> implementations that were traced so far in this process, joined by '+'."""
  return {op: "+".join(sorted(impls)) for op, impls in sorted(_CHOSEN.items())}
