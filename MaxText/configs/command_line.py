"""What the command lines share: CONFIG before the keys, and a --help whose keys are those of base.yml."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from MaxText.common import command
from MaxText.common.errors import InputError
from MaxText.configs import loader
from MaxText.configs.options import Options
from MaxText.configs.schema import Config

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


def run[Kind: Options](
  arguments: Sequence[str] | None,
  usage: str,
  help_text: str,
  schema: type[Kind],
  act: Callable[[str, Config, Kind], None],
) -> int:
  """Runs a command `CONFIG key=value ...` of a model and returns its exit status.

  Args:
    arguments: of the command; those of the process when None.
    usage: one line, for a command without CONFIG.
    help_text: what stands in --help before the keys; {models} are the names that CONFIG may be.
    schema: keys of the command.
    act: called with CONFIG as it was given, the model, and the keys of the command.
  """

  def help_lines() -> Iterator[str]:
    yield help_text.format(models=", ".join(loader.known_models()))
    yield from key_listing(schema.model_fields | Config.model_fields)
    yield f"\nEvery key of a model file may be given too, for example {EXAMPLE_KEY}."

  def act_on(given: list[str]) -> int:
    split = config_and_keys(given, usage, help_lines)
    if split is not None:
      config, overrides = split
      act(config, *loader.load_command(config, overrides, schema))
    return 0

  return command.run(act_on, arguments)


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
