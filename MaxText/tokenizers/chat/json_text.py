"""JSON as the chat formats write and read it."""

import json
import math
from typing import Any


def read(text: str) -> Any:
  """Reads JSON strictly: `NaN`, infinite numbers and what nests too deep to be read are no JSON.

  Raises:
    ValueError: the text is not JSON.
  """
  try:
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)
  except RecursionError:
    raise ValueError("nested too deep") from None


def _refuse(name: str) -> None:
  raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
  number = float(digits)
  if math.isinf(number):
    raise ValueError(f"{digits} is too large")
  return number


def spaced(value: Any) -> str:
  """Writes JSON with a space behind each comma and colon, and every character as itself."""
  return json.dumps(value, ensure_ascii=False)


def compact(value: Any) -> str:
  """Writes JSON without spaces, and every character as itself."""
  return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def sorted_compact(value: Any) -> str:
  """Writes JSON as `compact`, with the keys of every object in order."""
  return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def type_name(value: Any) -> str:
  """Returns the name that JSON Schema has for the type of a value that `read` gave."""
  if value is None:
    return "null"
  names = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"}
  return names[type(value)]
