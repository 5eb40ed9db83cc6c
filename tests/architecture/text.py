"""Names, sizes, comments, and names that nothing binds."""

import ast
import builtins
import io
import re
import symtable
import tokenize
from collections.abc import Iterator

from tests.architecture.imports import imported
from tests.architecture.source import Source

FUNCTION_LINES, PALLAS_LINES, FILE_LINES = 60, 150, 600
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "manager", "stuff"}
MODULE_NAMES = {"__file__", "__name__", "__doc__", "__package__", "__spec__"}


def names_are_nouns(source: Source) -> Iterator[str]:
  """No file or folder has a name that says nothing about what is inside."""
  vague = VAGUE_NAMES.intersection((*source.path.parent.parts, source.path.stem))
  yield from (f"{source.path}: the name '{name}' says nothing" for name in vague)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
  return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: ast.FunctionDef) -> int:
  """Lines from `def` to the end, without the docstring."""
  first = function.body[0]
  is_docstring = ast.get_docstring(function, clean=False) is not None
  return function.end_lineno - function.lineno + 1 - is_docstring * (first.end_lineno - first.lineno + 1)


def sizes_are_bounded(source: Source) -> Iterator[str]:
  """Functions stay within 60 lines (bodies of Pallas kernels 150) and files within 600."""
  lines = len(source.text.splitlines())
  if lines > FILE_LINES:
    yield f"{source.path}: {lines} lines, at most {FILE_LINES}"
  for function in functions(source.tree):
    is_pallas = source.path.stem.startswith("pallas") and function.name.endswith("_kernel")
    limit = PALLAS_LINES if is_pallas else FUNCTION_LINES
    if code_lines(function) > limit:
      where = f"{source.path}:{function.lineno}: {function.name}"
      yield f"{where} has {code_lines(function)} lines, at most {limit}"


def nothing_is_left_open(source: Source) -> Iterator[str]:
  """No reminders in comments, and annotations that are evaluated, so that jaxtyping can check them."""
  for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
    if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
      yield f"{source.path}:{token.start[0]}: unfinished: {token.string}"
  yield from (
    f"{source.path}:{line}: {name}" for line, name in imported(source) if name == "__future__.annotations"
  )


def names_are_bound(source: Source) -> Iterator[str]:
  """No name is read that nothing binds: the linter cannot tell them from the shapes in annotations."""
  module = symtable.symtable(source.text, source.path.as_posix(), "exec")
  known = {
    symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()
  }
  known |= {table.get_name() for table in module.get_children()} | set(dir(builtins)) | MODULE_NAMES
  tables = [module]
  for table in tables:
    tables += table.get_children()
    read = (s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global())
    yield from (f"{source.path}: {name} in {table.get_name()} is bound nowhere" for name in {*read} - known)
