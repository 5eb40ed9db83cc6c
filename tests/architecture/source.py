"""A Python file of the repository as the rules see it."""

import ast
import functools
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Source(NamedTuple):
  """One Python file: its path below the repository, its text and its syntax tree."""

  path: PurePosixPath
  text: str
  tree: ast.Module

  @classmethod
  def of(cls, path: str, text: str) -> "Source":
    return cls(PurePosixPath(path), text, ast.parse(text))

  @property
  def room(self) -> str | None:
    """Folder of the package that the file is in, or None for a command line."""
    return self.path.parts[1] if len(self.path.parts) > 2 else None


@functools.cache
def sources(folder: str) -> list[Source]:
  """Every Python file below a folder of the repository."""
  files = sorted((ROOT / folder).rglob("*.py"))
  return [Source.of(path.relative_to(ROOT).as_posix(), path.read_text()) for path in files]
