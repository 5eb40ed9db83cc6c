"""What the public says of itself, and whether docstrings and annotations agree on shapes."""

import ast
import re
from collections.abc import Iterator

from tests.architecture.source import Source

ARRAY_TYPES = {"Float", "Int", "UInt", "Bool", "Num", "Shaped", "UInt8", "Int32", "UInt32", "Float32", "Key"}


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
  """Public classes and functions, and the public methods of public classes."""
  for node in tree.body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
      yield node
      if isinstance(node, ast.ClassDef):
        yield from (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name.lstrip("_") == f.name)
        yield from (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__call__")


def the_public_is_documented(source: Source) -> Iterator[str]:
  """Modules, public classes, functions and methods say what they do."""
  if source.text.strip() and not ast.get_docstring(source.tree):
    yield f"{source.path}: no module docstring"
  for node in public(source.tree):
    if not ast.get_docstring(node):
      yield f"{source.path}:{node.lineno}: {node.name} has no docstring"


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
  spec = function.args
  every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
  return [arg for arg in every if arg.arg not in ("self", "cls")]


def the_public_is_annotated(source: Source) -> Iterator[str]:
  """Every argument and every result of a public function has a type."""
  for node in public(source.tree):
    if isinstance(node, ast.ClassDef):
      continue
    untyped = [arg.arg for arg in arguments(node) if arg.annotation is None] + ["the result"] * (
      node.returns is None
    )
    yield from (f"{source.path}:{node.lineno}: {node.name}: {name} has no type" for name in untyped)


Shape = tuple[str, ...]


def shape_of(dimensions: str) -> Shape:
  """'*N T R+P' and '*N, T, R + P' in one form: ('*N', 'T', 'RP'); the offset in W-1 is dropped."""
  words = re.sub(r"(?<=\w) *([*+/-]) +(?=\w)", r"\1", dimensions.replace(",", " ")).split()
  plain = (re.sub(r"[-+]\d+$|[^\w/]", "", word) for word in words)
  return tuple("*" * (word[0] in "*.") + name for word, name in zip(words, plain))


def annotated_shapes(annotation: ast.AST | None) -> set[Shape]:
  """Shapes of all arrays in an annotation such as `tuple[Float[Array, "B T"], Int[Array, "B"]] | None`."""
  nodes = ast.walk(annotation) if annotation else ()
  arrays = (n for n in nodes if isinstance(n, ast.Subscript) and getattr(n.value, "id", "") in ARRAY_TYPES)
  dims = (n.slice.elts[1].value for n in arrays if isinstance(n.slice, ast.Tuple))
  return {shape_of(text) for text in dims if isinstance(text, str)}


def matches(documented: Shape, annotated: set[Shape]) -> bool:
  """Equal, but `*N` may be written `...` or `N`, or be left out where it leads; K/2 has no letter."""

  def same(got: str, want: str) -> bool:
    return got == want or "/" in got or (want[0] == "*" and (got[0] == "*" or got == want[1:]))

  leading = {shape[1:] for shape in annotated if shape[:1] and shape[0][0] == "*"}
  return any(len(documented) == len(s) and all(map(same, documented, s)) for s in annotated | leading)


def documented_shapes(text: str, name: str) -> list[Shape]:
  """Shapes that stand right behind `name` in a docstring."""
  return [shape_of(found) for found in re.findall(rf"(?<![\w.]){name}(?: \([^)]*\))?:? \[([^\]]+)\]", text)]


def shapes_agree(source: Source) -> Iterator[str]:
  """A shape in a docstring is the one that the annotation states, for arguments, attributes and results."""
  for node in ast.walk(source.tree):
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
      continue
    text = ast.get_docstring(node) or ""
    typed = arguments(node) if isinstance(node, ast.FunctionDef) else node.body
    names = [
      (getattr(n, "arg", None) or ast.unparse(n.target), n.annotation)
      for n in typed
      if hasattr(n, "annotation")
    ]
    for name, annotation in names:
      shapes = annotated_shapes(annotation)
      wrong = [shape for shape in documented_shapes(text, name) if shapes and not matches(shape, shapes)]
      yield from (
        f"{source.path}:{node.lineno}: {node.name}: {name} is {shapes}, not {shape}" for shape in wrong
      )
    if isinstance(node, ast.FunctionDef):
      yield from wrong_results(source, node, text)


def wrong_results(source: Source, function: ast.FunctionDef, text: str) -> Iterator[str]:
  """Shapes of the Returns section that the result's annotation lacks."""
  shapes = annotated_shapes(function.returns)
  section = re.search(r"^Returns:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
  for found in re.findall(r"\[([A-Z.*][^\]]*)\]", section[1] if shapes and section else ""):
    if not matches(shape_of(found), shapes):
      yield f"{source.path}:{function.lineno}: {function.name}: returns {shapes}, not [{found}]"


def arrays_state_their_shape(source: Source) -> Iterator[str]:
  """The docstring of a public function repeats each array's shape, or names whose contract it has."""
  for node in public(source.tree):
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef) or re.search(r"(arguments|contract) (as|of)\b", text, re.IGNORECASE):
      continue
    stated = {shape_of(found) for found in re.findall(r"\[([^\]]+)\]", text)}
    for arg in arguments(node):
      shapes = annotated_shapes(arg.annotation) - {(), ("*",)}
      if shapes and not any(matches(shape, shapes) for shape in stated):
        yield f"{source.path}:{node.lineno}: {node.name}: no shape of {arg.arg} in the docstring"
