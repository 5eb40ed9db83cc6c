"""What a file may import."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator

from tests.architecture.source import ROOT, Source

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
  "MaxText/inference/microbenchmark_plot.py": {"matplotlib"},
  "MaxText/inference/openai_server.py": {"fastapi"},
  "MaxText/inference/jetstream_server.py": {"grpc"},
  "MaxText/inference/jetstream_shim.py": {"jetstream"},
  "MaxText/inference/jetstream_service.py": {"grpc"},
  "MaxText/serve.py": {"fastapi", "prometheus_client", "uvicorn"},
}
IMPORT_NAMES = {
  "pyyaml": "yaml",
  "orbax-checkpoint": "orbax",
  "prometheus-client": "prometheus_client",
  "google-jetstream": "jetstream",
  "grpcio": "grpc",
}  # where it is not the distribution's own name


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
