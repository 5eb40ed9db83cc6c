"""Builds a configuration: base.yml < model file < key=value. Nothing else reads the YAML files.

A configuration is named by a path, a path inside the package, a model name, or a directory (or file) in the
published `config.json` form.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from pydantic import BaseModel

from MaxText.common.errors import ConfigError, did_you_mean
from MaxText.common.steps import whole_steps
from MaxText.configs import yaml_text
from MaxText.configs.checking import alternatives, construct
from MaxText.configs.mesh import AxisRules, MeshConfig
from MaxText.configs.options import COMMANDS, MeshOptions, Options
from MaxText.configs.published import key_origins, model_keys
from MaxText.configs.schema import Config

CONFIGS = Path(__file__).resolve().parent
MODELS = CONFIGS / "models"
MESHES = CONFIGS / "meshes"
TRAINING_MESH = "fsdp"
_COMMAND_LINE = "command line"


class Layered(NamedTuple):
  """Merged keys of all layers.

  Attributes:
    path: the file that the user named, for messages.
    values: key -> value of the highest layer that states it.
    origins: key -> the file that stated it, or "command line".
  """

  path: str
  values: dict[str, Any]
  origins: dict[str, str]


def load(config: str | Path, overrides: Sequence[str] = ()) -> Config:
  """Loads a model configuration.

  Args:
    config: path, path inside the package, model name, or directory with a published config.json.
    overrides: `key=value` texts, which win over every file.

  Raises:
    ConfigError: no such file or model; unknown, repeated, missing or mistyped key; impossible combination.
  """
  return _model(_layers(config, overrides, Config))


def load_command[OptionsT: Options](
  config: str | Path, overrides: Sequence[str], options: type[OptionsT]
) -> tuple[Config, OptionsT]:
  """Loads a model configuration together with the keys of one command, e.g. `DecodeOptions`."""
  layered = _layers(config, overrides, Config, options)
  mine = {key: value for key, value in layered.values.items() if key in options.model_fields}
  return _model(layered), construct(options, mine, layered.origins, layered.path)


def load_mesh(options: MeshOptions) -> MeshConfig | None:
  """Loads the mesh that a command names, with the sizes that it overrides; None without one.

  Raises:
    ConfigError: no such file; unknown, missing or mistyped key; contradicting rules.
  """
  return None if options.mesh is None else _mesh(options.mesh, options)


def load_training_mesh(options: MeshOptions) -> MeshConfig:
  """Loads the mesh as `load_mesh` does; without a name the one in which all devices share the weights."""
  return _mesh(options.mesh or TRAINING_MESH, options)


def _mesh(name: str, options: MeshOptions) -> MeshConfig:
  path = _find_mesh(name)
  values = _mapping(path)
  _refuse_unknown(values, MeshConfig, str(path))
  rules = values.get("logical_axis_rules")
  if not isinstance(rules, dict):
    raise ConfigError(f"{path}: logical_axis_rules: got {rules!r}, expected a mapping")
  where = f"{path}: logical_axis_rules"
  _refuse_unknown(rules, AxisRules, where)
  values["logical_axis_rules"] = construct(AxisRules, rules, dict.fromkeys(rules, where), where)
  origins = dict.fromkeys(values, str(path))
  values |= options.mesh_sizes
  origins |= dict.fromkeys(options.mesh_sizes, _COMMAND_LINE)
  return construct(MeshConfig, values, origins, str(path))


def _find_mesh(mesh: str) -> Path:
  for path in (Path(mesh), MESHES / mesh, MESHES / f"{mesh}.yml"):
    if path.is_file():
      return path
  known = sorted(path.stem for path in MESHES.glob("*.yml"))
  raise ConfigError(
    f"mesh: {mesh}: no such file or mesh{did_you_mean(mesh, known)} (meshes: {', '.join(known)})"
  )


def _refuse_unknown(values: dict[str, Any], schema: type[BaseModel], source: str) -> None:
  for key in values:
    if key not in schema.model_fields:
      raise ConfigError(f"{source}: {key}: unknown key{did_you_mean(key, schema.model_fields)}")


def known_models() -> list[str]:
  """Returns the names of the model files in the package."""
  return sorted(path.stem for path in MODELS.glob("*.yml"))


def _model(layered: Layered) -> Config:
  values = {key: value for key, value in layered.values.items() if key in Config.model_fields}
  return construct(Config, values, layered.origins, layered.path)


def _layers(config: str | Path, overrides: Sequence[str], *schemas: type[Config] | type[Options]) -> Layered:
  path = find(config)
  layered = Layered(str(path), {}, {})
  for layer, keys, origins in _chain(path):
    for key in keys:
      _check_known(key, str(layer))
    layered.values.update(keys)
    layered.origins.update(origins)
  given = _parse(overrides, schemas)
  layered.values.update(given)
  layered.origins.update(dict.fromkeys(given, _COMMAND_LINE))
  return layered


# --- files --------------------------------------------------------------------------------------------------


def find(config: str | Path) -> Path:
  """Returns the file that `config` names: a .yml file or a published config.json.

  Raises:
    ConfigError: nothing of that name exists; the message lists the models of the package.
  """
  text = str(config)
  inside = text.removeprefix("MaxText/")
  for path in (Path(text), CONFIGS.parent / inside, CONFIGS / inside, MODELS / text, MODELS / f"{text}.yml"):
    if path.is_file():
      return path
    if (path / "config.json").is_file():
      return path / "config.json"
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.json").is_file():
      return _run_config(path)
  if Path(text).is_dir():
    raise ConfigError(f"{text}: this directory holds no config.json")
  models = known_models()
  hint = did_you_mean(Path(text).stem if text.endswith(".yml") else text, models)
  raise ConfigError(f"{text}: no such file or model{hint} (models: {', '.join(models)})")


def _run_config(checkpoint: Path) -> Path:
  """Returns the config.json of the training run that RUN/checkpoints/STEP is of."""
  if not checkpoint.is_dir():
    last = whole_steps(checkpoint.parent)[:-9:-1]
    there = f"there are {', '.join(map(str, last))}" if last else "there are none"
    raise ConfigError(f"{checkpoint}: no such checkpoint of this training run; {there}")
  return checkpoint.parent.parent / "config.json"


def _chain(path: Path) -> list[tuple[Path, dict[str, Any], dict[str, str]]]:
  """Returns (file, keys, origins) in order of merging: base.yml, the bases that the files name, `path`."""
  chain, following = [], path
  while following is not None:
    if following.resolve() in [earlier.resolve() for earlier, *_ in chain]:
      raise ConfigError(f"{chain[0][0]}: base_config: '{following.name}' leads back to itself")
    keys, origins = _read(following)
    base = keys.pop("base_config", None)
    chain.insert(0, (following, keys, origins))
    following = _base(following, base)
  return chain


def _base(path: Path, name: str | None) -> Path | None:
  """Returns the file below `path`: the one that it names, beside it or in the package, or else base.yml."""
  if name is None:
    return None if path.resolve() == CONFIGS / "base.yml" else CONFIGS / "base.yml"
  for base in (path.parent / str(name), CONFIGS / str(name)):
    if base.is_file():
      return base
  raise ConfigError(f"{path}: base_config: no such file '{name}'")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
  if path.suffix == ".json":
    content = read_published(path)
    return model_keys(content, str(path)), key_origins(content, str(path))
  keys = _mapping(path)
  return keys, dict.fromkeys(keys, str(path))


def read_published(path: Path) -> dict[str, Any]:
  """Reads a published config.json.

  Raises:
    ConfigError: the file is not JSON or not an object.
  """
  try:
    content = json.loads(_text(path))
  except json.JSONDecodeError as failure:
    raise ConfigError(f"{path}: not JSON ({failure})") from None
  if not isinstance(content, dict):
    raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
  return content


def _text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as failure:
    raise ConfigError(f"{path}: unreadable ({failure})") from None


def _mapping(path: Path) -> dict[str, Any]:
  content = yaml_text.parse(_text(path), str(path))
  if not isinstance(content, dict):
    raise ConfigError(f"{path}: expected keys and values, got {type(content).__name__}")
  return {str(key): value for key, value in content.items()}


# --- key=value ----------------------------------------------------------------------------------------------


def _parse(overrides: Sequence[str], schemas: Sequence[type[Config] | type[Options]]) -> dict[str, Any]:
  fields = {key: field for schema in schemas for key, field in schema.model_fields.items()}
  given: dict[str, Any] = {}
  for override in overrides:
    key, equals, text = override.partition("=")
    if not equals:
      raise ConfigError(f"{override}: expected key=value{did_you_mean(key, fields)}")
    if key not in fields:
      _check_known(key, _COMMAND_LINE)
      raise ConfigError(f"{_COMMAND_LINE}: {key}: not a key of this command{did_you_mean(key, fields)}")
    value = _value(key, text, fields[key].annotation)
    if key in given and given[key] != value:
      raise ConfigError(f"{_COMMAND_LINE}: {key}: given twice, as {given[key]!r} and {value!r}")
    given[key] = value
  return given


def _value(key: str, text: str, annotation: Any) -> Any:
  kinds = alternatives(annotation)
  if str in kinds:
    return text  # verbatim: a prompt such as "[x: y" or "123" is no YAML
  is_list = any(get_origin(kind) is tuple for kind in kinds)
  bare_list = is_list and not text.startswith("[")
  value = yaml_text.parse(f"[{text}]" if bare_list else text, f"{_COMMAND_LINE}: {key}")
  return None if is_list and value == [None] and type(None) in kinds else value


def foreign_value(key: str, text: str) -> Any:
  """Reads `text` as YAML: the value of a command line's key that another package's schema will check.

  Raises:
    ConfigError: it is no YAML.
  """
  return yaml_text.parse(text, f"{_COMMAND_LINE}: {key}")


def _check_known(key: str, source: str) -> None:
  known = {name for schema in (Config, *COMMANDS) for name in schema.model_fields}
  if key not in known:
    raise ConfigError(f"{source}: {key}: unknown key{did_you_mean(key, known | {'base_config'})}")
