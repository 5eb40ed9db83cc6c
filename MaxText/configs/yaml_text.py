"""YAML as this project reads and writes it: YAML 1.2 scalars, no duplicate keys."""

import re
from typing import Any

import yaml

from MaxText.common.errors import ConfigError


class _Loader(yaml.SafeLoader):
  """Safe loader: 1e-5 is a number, `no` is a string, a repeated key is an error."""

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
      key = str(key_node.value)
      if key in seen:
        raise yaml.MarkedYAMLError(problem=f"{key} is stated twice", problem_mark=key_node.start_mark)
      seen.add(key)
    return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
  """Safe dumper that also quotes the strings which only YAML 1.2 takes for numbers."""


_SCALARS = (
  ("null", r"(?:null|Null|NULL|~|)$", [*"nN~", ""]),
  ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
  ("int", r"[-+]?[0-9]+$", [*"-+0123456789"]),
  ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", [*"-+.0123456789"]),
)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
  _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
  _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
# PyYAML reads a leading zero as octal; YAML 1.2 does not
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def parse(text: str, source: str) -> Any:
  """Parses one document.

  Raises:
    ConfigError: bad syntax or a key stated twice; the message begins with `source`.
  """
  try:
    return yaml.load(text, _Loader)
  except yaml.YAMLError as failure:
    problem = getattr(failure, "problem", None) or str(failure)
    mark = getattr(failure, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    raise ConfigError(f"{source}: not YAML: {problem}{place}") from None


def dump(keys: dict[str, Any]) -> str:
  """Writes a mapping in its own order; `parse` gives the same values back."""
  # non-ASCII text is escaped: PyYAML folds a bare U+0085 into a blank
  return yaml.dump(keys, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)
