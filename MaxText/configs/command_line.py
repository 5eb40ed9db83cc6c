"""What the command lines share: CONFIG before the keys, and a --help whose keys are those of base.yml."""

import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from MaxText.common.errors import InputError
from MaxText.configs import loader

EXAMPLE_KEY = "max_position_embeddings=1024"  # of a model file; fits every model of the package
WIDTH = 26  # of `key=default` in a listing


class DocumentedKey(NamedTuple):
  """A line of base.yml.

  Attributes:
    section: heading that it stands below.
    key: its name.
    default: as written, empty for null.
    meaning: the comment behind it.
  """

  section: str
  key: str
  default: str
  meaning: str


def config_and_keys(
  arguments: list[str], usage: str, help_lines: Callable[[], Iterator[str]]
) -> tuple[str, list[str]] | None:
  """Splits `CONFIG key=value ...`, or prints the help and returns None where that is asked for.

  Raises:
    InputError: CONFIG is missing; the usage stands on stderr then.
  """
  if {"-h", "--help", "help"} & set(arguments):
    print("\n".join(help_lines()))
    return None
  if not arguments or "=" in arguments[0]:
    print(usage, file=sys.stderr)
    raise InputError(f"CONFIG is missing; it comes first (models: {', '.join(loader.known_models())})")
  return arguments[0], arguments[1:]


def documented_keys(known: Collection[str]) -> Iterator[DocumentedKey]:
  """Yields those lines of base.yml whose key is in `known`, in their order."""
  section = ""
  for line in (loader.CONFIGS / "base.yml").read_text(encoding="utf-8").splitlines():
    if heading := re.fullmatch(r"# -+ (.+?) -+", line):
      section = heading[1]
    elif (found := re.fullmatch(r"(\w+): (.*?)\s+# (.+)", line)) and found[1] in known:
      yield DocumentedKey(section, found[1], found[2].replace("null", ""), found[3])


def key_listing(known: Collection[str], width: int = WIDTH) -> Iterator[str]:
  """Yields lines that list the keys in `known` with default and meaning, below the headings of base.yml."""
  section = ""
  for each in documented_keys(known):
    if each.section != section:
      section = each.section
      yield f"\n  {section}"
    yield f"    {f'{each.key}={each.default}':<{width}} {each.meaning}"
