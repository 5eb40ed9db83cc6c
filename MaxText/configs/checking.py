"""Turns a failed check of a schema into one `ConfigError` that names source, key, value and expectation."""

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from MaxText.common.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "a mapping"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def alternatives(annotation: Any) -> tuple[Any, ...]:
  """Returns the members of a union, or the annotation alone."""
  is_union = get_origin(annotation) in (Union, types.UnionType)
  return get_args(annotation) if is_union else (annotation,)


def expectation(field: FieldInfo) -> str:
  """Says in words what a key may hold, e.g. "a whole number > 0 or null"."""
  words = [_one(kind) for kind in alternatives(field.annotation)]
  limits = [(sign, getattr(limit, name, None)) for limit in field.metadata for name, sign in _BOUNDS.items()]
  if bounds := [f"{sign} {limit}" for sign, limit in limits if limit is not None]:
    words[0] += " " + " and ".join(bounds)
  return " or ".join(words)


def _one(kind: Any) -> str:
  origin = get_origin(kind)
  if kind is type(None):
    return "null"
  if origin is Literal:
    choices = [str(choice) for choice in get_args(kind)]
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
  if origin is tuple:
    if get_args(kind)[0] is str:
      return "a list of strings"
    choices = get_args(get_args(kind)[0])  # of a Literal; a plain type has none
    return f"a list of {', '.join(choices) or 'whole numbers'}"
  return _WORDS[origin or kind]


def construct[SchemaT: BaseModel](
  schema: type[SchemaT], values: Mapping[str, Any], origins: Mapping[str, str], path: str
) -> SchemaT:
  """Builds `schema` from values that carry no unknown key.

  Args:
    schema: a strict pydantic model.
    values: key -> value; lists become tuples, which every listing field is.
    origins: key -> file (or "command line") that set it, for the message.
    path: the file to name where no origin is known.

  Raises:
    ConfigError: a key is missing (all of them are named), has a wrong type, or contradicts another one.
  """
  plain = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
  try:
    return schema(**plain)
  except ValidationError as failure:
    errors = failure.errors()
  missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing"]
  if missing:
    noun = "key" if len(missing) == 1 else "keys"
    raise ConfigError(f"{path}: missing {noun} {', '.join(missing)} (no default exists)")
  location, context = errors[0]["loc"], errors[0].get("ctx", {})
  if not location:  # a contradiction: the schema's own line, which begins with the key
    line = str(context["error"])
    raise ConfigError(f"{origins.get(line.split(':')[0], path)}: {line}")
  key = str(location[0])
  wanted = expectation(schema.model_fields[key])
  raise ConfigError(f"{origins.get(key, path)}: {key}: got {values[key]!r}, expected {wanted}")
