"""The rules of docs/architecture.md, read off the syntax trees; each is also shown a source that breaks it.

A rule takes one source and yields its violations; `RULES` says where each rule holds.
"""

import ast
import builtins
import functools
import io
import re
import subprocess
import symtable
import sys
import textwrap
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FUNCTION_LINES, PALLAS_LINES, FILE_LINES = 60, 150, 600

# room -> rooms that it may import; a room may always import itself
BASE = {"common"}
ARROWS = {
  "common": set(),
  "configs": BASE,
  "kernels": BASE,
  "tokenizers": BASE,
  "layers": BASE | {"configs", "kernels"},
  "models": BASE | {"configs", "kernels", "layers"},
  "checkpoints": BASE | {"configs", "kernels", "layers", "models"},
  "planning": BASE | {"configs", "kernels", "layers", "models"},
  "training": BASE | {"configs", "kernels", "layers", "models", "checkpoints", "tokenizers"},
  "inference": BASE | {"configs", "kernels", "layers", "models", "checkpoints", "tokenizers"},
}
# room or file -> what it may import beside the core's dependencies, from an extra of pyproject.toml
EXTRAS = {
  "MaxText/training": {"maxtext", "optax", "grain", "pyarrow"},
  "MaxText/inference/metrics.py": {"prometheus_client"},
  "MaxText/inference/openai_server.py": {"fastapi"},
  "MaxText/serve.py": {"fastapi", "prometheus_client", "uvicorn"},
}
IMPORT_NAMES = {
  "pyyaml": "yaml",
  "orbax-checkpoint": "orbax",
  "prometheus-client": "prometheus_client",
}  # where it is not the distribution's own name
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "manager", "stuff"}
MODULE_NAMES = {"__file__", "__name__", "__doc__", "__package__", "__spec__"}
MATMULS = {"einsum", "dot", "matmul", "tensordot", "vdot", "inner", "dot_general"}
ARRAY_TYPES = {"Float", "Int", "UInt", "Bool", "Num", "Shaped", "UInt8", "Int32", "UInt32", "Float32", "Key"}


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


# --- what a file imports -----------------------------------------------------------------------------------


def imported(source: Source) -> Iterator[tuple[int, str]]:
  """Line and full dotted name of every import: at the top, inside a function, or by string."""
  package = source.path.parent.parts
  for node in ast.walk(source.tree):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      above = package[: len(package) + 1 - node.level] if node.level else ()
      module = ".".join((*above, *filter(None, [node.module])))
      yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
      yield from ((node.lineno, arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def imports_point_down(source: Source) -> Iterator[str]:
  """A room imports only the rooms below it, never a command line and never the package's front door."""
  if source.room is None:
    return
  for line, name in imported(source):
    first, *rest = name.split(".")
    if first != "MaxText":
      continue
    target = rest[0] if rest else "the package itself"
    if target != source.room and target not in ARROWS[source.room]:
      yield f"{source.path}:{line}: {source.room}/ may not import {target}"
    if source.room == "layers" and target == "configs" and rest[1:2] != ["schema"]:
      yield f"{source.path}:{line}: layers/ may import configs.schema only"


def import_names(declared: list[str]) -> set[str]:
  """Import names of requirements."""
  distributions = (re.match(r"[\w-]+", requirement)[0] for requirement in declared)
  return {IMPORT_NAMES.get(name, name) for name in distributions}


@functools.cache
def project() -> dict:
  """What pyproject.toml says of the package."""
  return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def third_parties_are_declared(source: Source) -> Iterator[str]:
  """The core imports its declared dependencies and nothing else; `EXTRAS` says which file may import more."""
  known = import_names(project()["dependencies"]).union(sys.stdlib_module_names, {"MaxText"})
  known = known.union(*(EXTRAS.get(place.as_posix(), ()) for place in (source.path, *source.path.parents)))
  for line, name in imported(source):
    if name.split(".")[0] not in known:
      yield f"{source.path}:{line}: {name} is no dependency of the core, nor of an extra for this file"


def only_the_loader_reads_yaml(source: Source) -> Iterator[str]:
  """PyYAML stays behind configs/yaml_text.py, and only configs/loader.py parses with it."""
  path = source.path.as_posix()
  for line, name in imported(source):
    if name.split(".")[0] == "yaml" and path != "MaxText/configs/yaml_text.py":
      yield f"{path}:{line}: imports {name}"
  for node in ast.walk(source.tree):
    if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("yaml_text.parse"):
      if path != "MaxText/configs/loader.py":
        yield f"{path}:{node.lineno}: reads YAML"


# --- names, sizes, comments --------------------------------------------------------------------------------


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


# --- docstrings --------------------------------------------------------------------------------------------


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


# --- numerics ----------------------------------------------------------------------------------------------


def references_pin_precision(source: Source) -> Iterator[str]:
  """A definition never rounds its products: each matmul names its precision; `@`, which cannot, is absent."""
  if source.path.stem != "reference":
    return
  pinned = {
    id(target)
    for call in ast.walk(source.tree)
    if isinstance(call, ast.Call)
    and any("HIGHEST" in ast.unparse(k) for k in call.keywords if k.arg == "precision")
    for target in (call.func, *call.args)
  }
  for node in ast.walk(source.tree):
    loose = isinstance(node, ast.Attribute) and node.attr in MATMULS and id(node) not in pinned
    if loose or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
      yield f"{source.path}:{node.lineno}: {ast.unparse(node)} does not pin precision=HIGHEST"


Rule = Callable[[Source], Iterator[str]]
PACKAGE, EVERYTHING = ("MaxText",), ("MaxText", "tests", "benchmarks", "scripts")
NUMERICAL = ("MaxText/kernels", "MaxText/layers", "MaxText/models", "MaxText/inference")
RULES: dict[Rule, tuple[str, ...]] = {
  imports_point_down: PACKAGE,
  third_parties_are_declared: PACKAGE,
  only_the_loader_reads_yaml: PACKAGE,
  names_are_nouns: EVERYTHING,
  sizes_are_bounded: EVERYTHING,
  nothing_is_left_open: EVERYTHING,
  names_are_bound: EVERYTHING,
  the_public_is_documented: PACKAGE,
  the_public_is_annotated: PACKAGE,
  shapes_agree: EVERYTHING,
  arrays_state_their_shape: NUMERICAL,
  references_pin_precision: ("MaxText/kernels",),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(rule):
  violations = [line for folder in RULES[rule] for source in sources(folder) for line in rule(source)]
  assert not violations, f"{rule.__doc__}\n" + "\n".join(violations)


LONG = "def f():\n" + "  x = 0\n" * 60
VIOLATIONS = [
  (imports_point_down, "MaxText/layers/mlp.py", "from MaxText.models.kimi_k3 import KimiDecoder"),
  (imports_point_down, "MaxText/kernels/kda/step.py", "def f():\n  import MaxText.configs.schema"),
  (imports_point_down, "MaxText/kernels/kda/step.py", "from ...layers import cache"),
  (imports_point_down, "MaxText/models/registry.py", "from MaxText import decode"),
  (imports_point_down, "MaxText/models/registry.py", "import MaxText"),
  (imports_point_down, "MaxText/inference/engine.py", "from MaxText.training import loop"),
  (imports_point_down, "MaxText/layers/mlp.py", "from MaxText.configs import loader"),
  (third_parties_are_declared, "MaxText/decode.py", "def f():\n  import torch"),
  (
    third_parties_are_declared,
    "MaxText/models/registry.py",
    "import importlib\nimportlib.import_module('maxtext')",
  ),
  (third_parties_are_declared, "MaxText/training/sft.py", "from transformers import AutoModel"),
  (third_parties_are_declared, "MaxText/inference/scheduler.py", "import prometheus_client"),
  (third_parties_are_declared, "MaxText/inference/openai_server.py", "import maxtext"),
  (only_the_loader_reads_yaml, "MaxText/configs/loader.py", "import yaml"),
  (only_the_loader_reads_yaml, "MaxText/configs/published.py", "yaml_text.parse(text, 'a')"),
  (names_are_nouns, "MaxText/layers/utils.py", ""),
  (names_are_nouns, "MaxText/helpers/mlp.py", ""),
  (sizes_are_bounded, "MaxText/layers/mlp.py", LONG),
  (sizes_are_bounded, "MaxText/kernels/kda/pallas_step.py", LONG),
  (
    sizes_are_bounded,
    "MaxText/kernels/kda/pallas_step.py",
    LONG.replace("f()", "f_kernel()") + "  x = 0\n" * 90,
  ),
  (sizes_are_bounded, "tests/test_mlp.py", "x = 0\n" * 601),
  (nothing_is_left_open, "MaxText/layers/mlp.py", "x = 0  # TODO: faster"),
  (nothing_is_left_open, "MaxText/layers/mlp.py", "from __future__ import annotations"),
  (names_are_bound, "MaxText/layers/mlp.py", "def f():\n  return jnp.zeros(3)"),
  (names_are_bound, "MaxText/layers/mlp.py", "x: Int = 0"),
  (the_public_is_documented, "MaxText/layers/mlp.py", "x = 0"),
  (the_public_is_documented, "MaxText/layers/mlp.py", '"""Doc."""\ndef f(): pass'),
  (
    the_public_is_documented,
    "MaxText/layers/mlp.py",
    '"""D."""\nclass C:\n  """D."""\n  def __call__(self): pass',
  ),
  (the_public_is_annotated, "MaxText/layers/mlp.py", "def f(x) -> int: pass"),
  (the_public_is_annotated, "MaxText/layers/mlp.py", "def f(x: int): pass"),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'def f(x: Float[Array, "B T"]):\n  """Args:\n  x: [T, B] thing."""',
  ),
  (shapes_agree, "MaxText/layers/mlp.py", 'class C:\n  """Attributes:\n  x: [B]"""\n  x: Int[Array, "B T"]'),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'def f() -> Float[Array, "B T"]:\n  """F.\n\n  Returns:\n    out [B, T] and n [T].\n  """',
  ),
  (
    arrays_state_their_shape,
    "MaxText/layers/mlp.py",
    'def f(x: Float[Array, "B T"]):\n  """Args:\n  x: a thing."""',
  ),
  (references_pin_precision, "MaxText/kernels/kda/reference.py", "jnp.einsum('ij,j->i', a, b)"),
  (
    references_pin_precision,
    "MaxText/kernels/kda/reference.py",
    "jnp.einsum('ij,j->i', a, b, precision=None)",
  ),
  (references_pin_precision, "MaxText/kernels/kda/reference.py", "a @ b"),
  (references_pin_precision, "MaxText/kernels/kda/reference.py", "f = partial(jnp.dot)"),
]
ACCEPTED = [
  (
    imports_point_down,
    "MaxText/layers/mlp.py",
    "from MaxText.configs.schema import Config\nfrom . import situ",
  ),
  (imports_point_down, "MaxText/decode.py", "from MaxText.inference import engine"),
  (third_parties_are_declared, "MaxText/training/compat.py", "import maxtext"),
  (third_parties_are_declared, "MaxText/inference/metrics.py", "import prometheus_client"),
  (only_the_loader_reads_yaml, "MaxText/configs/loader.py", "yaml_text.parse(text, 'a')"),
  (
    sizes_are_bounded,
    "MaxText/layers/mlp.py",
    LONG.replace("f():\n", 'f():\n  """Doc."""\n').replace("  x = 0\n", "", 1),
  ),
  (sizes_are_bounded, "MaxText/kernels/kda/pallas_step.py", LONG.replace("f()", "f_kernel()")),
  (
    names_are_bound,
    "MaxText/layers/mlp.py",
    "def f[T](x: T, y: 'B T') -> T:\n  return [g for g in x if len(g)]",
  ),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'def f(x: Float[Array, "*C B R+P"]):\n  """Args:\n  x: [B, R + P] thing."""',
  ),
  (shapes_agree, "MaxText/layers/mlp.py", 'def f(x: Float[Array, "B W 3"]):\n  """Takes x [B, W-1, 3]."""'),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'class C:\n  """Attributes:\n  x: [B, K/2]"""\n  x: Int[Array, "B half"]',
  ),
  (
    references_pin_precision,
    "MaxText/kernels/kda/reference.py",
    "f = partial(jnp.einsum, precision=Precision.HIGHEST)",
  ),
  (
    references_pin_precision,
    "MaxText/kernels/kda/reference.py",
    "jnp.dot(a, b, precision=lax.Precision.HIGHEST)",
  ),
  (references_pin_precision, "MaxText/kernels/kda/chunked.py", "a @ b"),
]


@pytest.mark.parametrize("rule, path, text", VIOLATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_violation_is_found(rule, path, text):
  assert list(rule(Source.of(path, text)))


@pytest.mark.parametrize("rule, path, text", ACCEPTED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_a_rule_allows_passes(rule, path, text):
  assert not list(rule(Source.of(path, text)))


def test_every_rule_is_shown_a_violation():
  assert {rule for rule, *_ in VIOLATIONS} == set(RULES)


def test_what_a_file_may_import_beside_the_core_is_in_an_extra():
  extras = set().union(*map(import_names, project()["optional-dependencies"].values()))
  assert set().union(*EXTRAS.values()) <= extras


def test_every_room_has_its_arrows():
  rooms = {path.parent.name for path in (ROOT / "MaxText").glob("*/__init__.py")}
  assert rooms <= set(ARROWS)


def test_importing_the_decoder_is_light():
  """At most 3 s of processor time, and none of the packages that training or a peer would bring."""
  program = """
    import sys, time
    import MaxText.decode
    heavy = {"maxtext", "torch", "tensorflow", "transformers"} & set(sys.modules)
    print(time.process_time(), *heavy)
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  seconds, *heavy = done.stdout.split()
  assert not heavy
  assert float(seconds) <= 3.0
