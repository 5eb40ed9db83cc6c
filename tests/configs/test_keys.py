"""base.yml, the schemas and the code know the same keys: commented, complete, none dead."""

import ast
import re
from pathlib import Path

import pytest

from MaxText.configs import yaml_text
from MaxText.configs.loader import CONFIGS, load, load_command
from MaxText.configs.mesh import MESH_AXES, size_key
from MaxText.configs.options import COMMANDS
from MaxText.configs.schema import Config
from MaxText.kernels.grouped_matmul import Impl as MoeImpl
from MaxText.kernels.kda import KdaImpl
from MaxText.kernels.mla import MlaImpl
from MaxText.kernels.short_conv import ShortConvImpl

PACKAGE = CONFIGS.parent
RUN_KEYS = {name for name, field in Config.model_fields.items() if not field.is_required()} - {
  "published_extra"
}
OPTION_KEYS = {name for command in COMMANDS for name in command.model_fields}
# keys that the configuration room itself consumes
CONFIGS_ONLY = {
  "mla_use_nope": "validated: only true is possible",
  "published_extra": "written back on export",
  "bos_token_id": "written back on export; no prompt begins with it (spec 1.6)",
  **{size_key(axis): "a size of the mesh" for axis in MESH_AXES},
}


def base_lines() -> dict[str, str]:
  """Key -> the rest of its line in base.yml."""
  lines = re.findall(r"^(\w+):(.*)$", (CONFIGS / "base.yml").read_text(), re.MULTILINE)
  assert len(lines) == len(dict(lines))
  return dict(lines)


def test_every_key_of_base_yml_has_a_comment():
  bare = [key for key, rest in base_lines().items() if not re.search(r" {2}# \S.{9,}", rest)]
  assert bare == []


def test_base_yml_states_every_run_key_and_nothing_else():
  assert set(base_lines()) == RUN_KEYS | OPTION_KEYS


def test_the_defaults_of_base_yml_are_those_of_the_schema():
  base = yaml_text.parse((CONFIGS / "base.yml").read_text(), "base.yml")
  stated = {key: tuple(value) if isinstance(value, list) else value for key, value in base.items()}
  assert {key: stated[key] for key in RUN_KEYS} == {key: Config.model_fields[key].default for key in RUN_KEYS}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_loads_with_its_defaults(command):
  cfg, options = load_command("kimi-k3-tiny", [], command)
  assert cfg == load("kimi-k3-tiny") and isinstance(options, command)


def test_a_key_belongs_to_the_model_or_to_commands():
  assert not OPTION_KEYS & set(Config.model_fields)


def attributes(tree: ast.AST) -> set[str]:
  """Names that code reads as attributes."""
  loads = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
  return {node.attr for node in loads}


def read_keys() -> set[str]:
  """Attribute names read outside configs/, and the keys behind the schema's own methods among them."""
  sources = [path for path in PACKAGE.rglob("*.py") if CONFIGS not in path.parents]
  read = set().union(*(attributes(ast.parse(path.read_text())) for path in sources))
  schema = ast.parse(Path(CONFIGS / "schema.py").read_text())
  methods = {n.name: attributes(n) for n in ast.walk(schema) if isinstance(n, ast.FunctionDef)}
  return read.union(*(keys for name, keys in methods.items() if name in read))


def test_every_key_is_read_by_code():
  dead = (set(Config.model_fields) | OPTION_KEYS) - read_keys() - set(CONFIGS_ONLY)
  assert sorted(dead) == []


def test_the_exceptions_are_exceptions():
  assert not set(CONFIGS_ONLY) & read_keys()


@pytest.mark.parametrize(
  "key, impl",
  [
    ("kda_impl", KdaImpl),
    ("mla_impl", MlaImpl),
    ("moe_impl", MoeImpl.__value__),
    ("short_conv_impl", ShortConvImpl),
  ],
)
def test_a_key_offers_every_implementation_of_its_operation(key, impl):
  assert Config.model_fields[key].annotation == impl
