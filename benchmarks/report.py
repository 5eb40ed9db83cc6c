"""How figures are told: a line each on stdout, and one in a file with where and when they were measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from MaxText.inference.measurement import surroundings


def report(figures: Sequence[dict[str, Any]], output: Path, **context: Any) -> None:
  """Prints each figure and appends it to `output` as a line of JSON.

  Args:
    figures: each with its name ("figure") and whether it is good enough ("passed").
    output: file of JSON lines; what it has stays.
    **context: what else the figures depend on, beside machine and versions.
  """
  where = surroundings() | context
  with output.open("a", encoding="utf-8") as lines:
    for figure in figures:
      print(("pass " if figure["passed"] else "FAIL ") + json.dumps(figure))
      lines.write(json.dumps(where | figure) + "\n")
