"""How every command line ends: a user's mistake is one line and exit status 2, never a traceback."""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from MaxText.common.errors import UserError

EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141  # 128 + signal number, as shells report it


def run(command: Callable[[list[str]], int], arguments: Sequence[str] | None) -> int:
  """Runs `command` on `arguments`, those of the process when None, and returns its exit status."""
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
  try:
    return command(list(sys.argv[1:] if arguments is None else arguments))
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USER_ERROR
  except KeyboardInterrupt:
    print("\ninterrupted", file=sys.stderr)
    return EXIT_INTERRUPTED
  except BrokenPipeError:
    # whoever read stdout has left; flushing what is buffered at exit must not fail again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_BROKEN_PIPE
