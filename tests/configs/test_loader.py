"""What the loader accepts, in which order layers win, and the one line that each mistake gets."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.common.errors import ConfigError
from MaxText.configs import yaml_text
from MaxText.configs.loader import MODELS, find, known_models, load, load_command
from MaxText.configs.options import DecodeOptions
from MaxText.configs.published import to_published
from MaxText.configs.schema import Config

TINY = "kimi-k3-tiny"


def refusal(config, *overrides, options=None) -> str:
  """The message of the ConfigError that loading gives; it is one line."""
  with pytest.raises(ConfigError) as caught:
    load_command(config, overrides, options) if options else load(config, overrides)
  message = str(caught.value)
  assert "\n" not in message
  return message


@pytest.fixture
def model_file(tmp_path):
  """Writes a model file that rests on the tiny model, and returns its path."""

  def write(text: str, name: str = "mine.yml", base: str = "models/kimi-k3-tiny.yml") -> str:
    path = tmp_path / name
    path.write_text(f"base_config: {base}\n{text}\n")
    return str(path)

  return write


# --- what a configuration is named by ----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yml")))
def test_every_model_file_loads_under_its_own_name(name):
  assert load(name).model_name == name


@pytest.mark.parametrize(
  "spelling", [TINY, f"{TINY}.yml", f"models/{TINY}.yml", f"configs/models/{TINY}.yml"]
)
def test_a_model_is_found_from_any_folder(spelling, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for prefix in ("", "MaxText/") if "/" in spelling else ("",):
    assert load(prefix + spelling) == load(MODELS / f"{TINY}.yml")


def test_a_directory_with_a_published_config_is_a_configuration(tmp_path):
  cfg = load(TINY, ["embedding_initializer_range=null"])  # no published key
  (tmp_path / "config.json").write_text(json.dumps(to_published(cfg)))
  for config in (tmp_path, tmp_path / "config.json"):
    assert load(config, ["dtype=bfloat16"]).model_copy(update={"model_name": TINY, "dtype": "float32"}) == cfg


def test_an_unknown_name_lists_the_models_and_the_nearest():
  message = refusal("kimi-k3-tny")
  assert message.startswith("kimi-k3-tny: no such file or model, did you mean 'kimi-k3-tiny'?")
  assert all(name in message for name in known_models())
  assert "did you mean 'kimi-k3'?" in refusal("configs/models/kimi-k33.yml")


def test_a_directory_without_a_config_says_so(tmp_path):
  assert refusal(tmp_path) == f"{tmp_path}: this directory holds no config.json"


def test_a_directory_in_the_way_does_not_hide_a_model(tmp_path, monkeypatch):
  (tmp_path / TINY).mkdir()
  monkeypatch.chdir(tmp_path)
  assert find(TINY) == MODELS / f"{TINY}.yml"


# --- layers ------------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_model_file_over_its_bases(model_file):
  path = model_file("dtype: bfloat16\nrouted_scaling_factor: 2.0\nmax_new_tokens: 7")
  cfg, options = load_command(path, ["routed_scaling_factor=3"], DecodeOptions)
  assert (cfg.dtype, cfg.routed_scaling_factor) == ("bfloat16", 3.0)
  assert (options.max_new_tokens, options.top_p) == (7, 1.0)
  assert cfg.kda_head_dim == load(TINY).kda_head_dim


def test_a_base_beside_the_file_wins_over_the_package_and_a_circle_is_refused(model_file):
  model_file("routed_scaling_factor: 2.0", name="mid.yml")
  assert load(model_file("dtype: bfloat16", base="mid.yml")).routed_scaling_factor == 2.0
  assert "leads back to itself" in refusal(model_file("", name="circle.yml", base="circle.yml"))
  assert "base_config: no such file 'absent.yml'" in refusal(model_file("", base="absent.yml"))


# --- keys --------------------------------------------------------------------------------------------------


def test_an_unknown_key_names_the_file_the_key_and_the_near_miss(model_file):
  path = model_file("gate_lower_bund: -5.0")
  assert refusal(path) == f"{path}: gate_lower_bund: unknown key, did you mean 'gate_lower_bound'?"
  line = "command line: gate_lower_bund: unknown key, did you mean 'gate_lower_bound'?"
  assert refusal(TINY, "gate_lower_bund=-5") == line
  assert "did you mean 'max_new_tokens'?" in refusal(TINY, "max_new_token=3", options=DecodeOptions)


def test_a_key_of_another_command_is_refused_on_the_command_line():
  assert refusal(TINY, "prompt=x") == "command line: prompt: not a key of this command"


def test_all_missing_keys_are_named_at_once(tmp_path):
  lines = (MODELS / f"{TINY}.yml").read_text().splitlines()
  dropped = ("activation_situ_beta", "gate_lower_bound", "num_experts")
  kept = [line for line in lines if line.partition(":")[0] not in dropped]
  path = tmp_path / "short.yml"
  path.write_text("\n".join(kept))
  assert refusal(path) == f"{path}: missing keys {', '.join(dropped)} (no default exists)"


@pytest.mark.parametrize("key", [name for name, field in Config.model_fields.items() if field.is_required()])
def test_no_architecture_key_has_a_default(key, tmp_path):
  keys = yaml_text.parse((MODELS / f"{TINY}.yml").read_text(), "tiny")
  del keys[key]
  path = tmp_path / "short.yml"
  path.write_text(yaml_text.dump(keys))
  assert refusal(path) == f"{path}: missing key {key} (no default exists)"


def test_a_repeated_yaml_key_is_refused(model_file):
  message = refusal(model_file("dtype: float32\ndtype: float32"))
  assert "dtype is stated twice (line 3, column 1)" in message
  assert "b is stated twice" in refusal(model_file("published_extra: {a: {b: 1, b: 2}}"))


def test_the_same_override_twice_is_accepted_and_two_values_are_refused():
  assert load(TINY, ["routed_scaling_factor=0.5", "routed_scaling_factor=5e-1"]).routed_scaling_factor == 0.5
  line = "command line: dtype: given twice, as 'bfloat16' and 'float32'"
  assert refusal(TINY, "dtype=bfloat16", "dtype=float32") == line


def test_a_word_without_a_value_is_refused():
  assert refusal(TINY, "dtyp") == "dtyp: expected key=value, did you mean 'dtype'?"


# --- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("override", "expected"),
  [
    ("num_experts=many", "got 'many', expected a whole number > 0"),
    ("num_experts=true", "got True, expected a whole number > 0"),
    ("num_experts=16.0", "got 16.0, expected a whole number > 0"),
    ("num_experts=0", "got 0, expected a whole number > 0"),
    ("q_lora_rank=-1", "got -1, expected a whole number > 0 or null"),
    ("gate_lower_bound=low", "got 'low', expected a number or null"),
    ("mla_use_nope=1", "got 1, expected true or false"),
    ("dtype=fp8", "got 'fp8', expected one of float32, bfloat16"),
    ("scan_layers=maybe", "got 'maybe', expected true or false or auto"),
    ("full_attn_layers=4,x", "got [4, 'x'], expected a list of whole numbers"),
    ("full_attn_layers=[4", "not YAML: expected ',' or ']', but got '<stream end>' (line 1, column 3)"),
    ("published_extra=3", "got 3, expected a mapping"),
  ],
)
def test_a_wrong_value_names_source_key_value_and_expectation(override, expected):
  assert refusal(TINY, override) == f"command line: {override.partition('=')[0]}: {expected}"


@pytest.mark.parametrize(
  ("override", "expected"),
  [
    ("top_p=0", "got 0, expected a number > 0 and <= 1"),
    ("temperature=-1", "got -1, expected a number >= 0"),
    ("output=xml", "got 'xml', expected one of text, json"),
    ("stop_ids=x", "got ['x'], expected a list of whole numbers or null"),
  ],
)
def test_a_wrong_option_names_source_key_value_and_expectation(override, expected):
  line = f"command line: {override.partition('=')[0]}: {expected}"
  assert refusal(TINY, override, options=DecodeOptions) == line


def test_a_wrong_value_in_a_file_names_the_file(model_file):
  path = model_file("num_experts: many")
  assert refusal(path) == f"{path}: num_experts: got 'many', expected a whole number > 0"


@pytest.mark.parametrize(
  ("text", "value"), [("5,7,9", (5, 7, 9)), ("[5, 7]", (5, 7)), ("5", (5,)), ("null", None), ("", ())]
)
def test_token_ids_are_written_with_commas(text, value):
  assert load_command(TINY, [f"stop_ids={text}"], DecodeOptions)[1].stop_ids == value


@pytest.mark.parametrize("text", ["123", "[x: y", "null", "true", "a=b", " # no comment", "line\nline", ""])
def test_a_prompt_is_taken_verbatim(text):
  assert load_command(TINY, [f"prompt={text}"], DecodeOptions)[1].prompt == text


@given(st.text())
@settings(max_examples=40, deadline=None)
def test_any_prompt_is_taken_verbatim(text):
  assert load_command(TINY, [f"prompt={text}"], DecodeOptions)[1].prompt == text


def test_two_kinds_of_prompt_exclude_each_other():
  message = refusal(TINY, "prompt=x", "prompt_ids=1,2", options=DecodeOptions)
  assert message.endswith("prompt: excludes prompt_ids; give one")


# --- YAML --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("1e-5", 1e-5),
    ("-5", -5),
    ("010", 10),
    (".5", 0.5),
    ("no", "no"),
    ("1_000", "1_000"),
    ("1:30", "1:30"),
    ("2026-11-30", "2026-11-30"),
    ("4.56.2", "4.56.2"),
    ("True", True),
    ("~", None),
  ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
  parsed = yaml_text.parse(text, "text")
  assert parsed == value and type(parsed) is type(value)


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
  max_leaves=8,
)
NUMBERLIKE = st.from_regex(re.compile(r"[-+]?[0-9._]{0,4}([eE][-+]?[0-9]{1,2})?", re.ASCII), fullmatch=True)


@given(st.dictionaries(st.text(min_size=1), JSON | NUMBERLIKE, max_size=5))
@settings(max_examples=150, deadline=None)
def test_dumped_yaml_parses_to_the_same_values(keys):
  assert yaml_text.parse(yaml_text.dump(keys), "text") == keys


@pytest.mark.parametrize("content", ["- a list", "just text", "a: [1", "a: b: c", ""])
def test_a_file_that_is_no_mapping_is_refused(content, tmp_path):
  path = tmp_path / "bad.yml"
  path.write_text(content)
  assert refusal(path).startswith(f"{path}: ")


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_a_config_json_that_is_no_object_is_refused(content, tmp_path):
  path = tmp_path / "config.json"
  path.write_text(content)
  assert refusal(path).startswith(f"{path}: ")
