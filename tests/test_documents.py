"""The documents against the tree: every command in them runs, or says why not; every path and link exists.

A fenced block of `bash` or `python` runs as it stands, in a folder that shows the repository and may be
written to. A comment above the fence changes that: `<!-- run with: KEY=VALUE ... -->` appends arguments to
each command of ours, to keep it short; `<!-- not run: REASON -->` leaves a check of its words.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from MaxText.configs import loader, options, schema
from MaxText.inference.compile_cache import compile_compactly
from MaxText.training import compat

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(
  r"(?:^<!-- (not run|run with): (.*?) -->\n)?^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


QUICK = "--xla_backend_optimization_level=0"  # one device, and little of LLVM's time


class Block(NamedTuple):
  """One fenced block: where it stands, what it is written in, and what its comment says of it."""

  name: str
  language: str
  text: str
  directive: str
  detail: str

  @property
  def commands(self) -> list[str]:
    lines = self.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks() -> list[Block]:
  found = []
  for document in DOCUMENTS:
    text = document.read_text()
    for match in BLOCK.finditer(text):
      line = text.count("\n", 0, match.start(3)) + 1
      directive, detail, language, body = match.groups()
      name = f"{document.relative_to(ROOT)}:{line}"
      found.append(Block(name, language, body, directive or "", detail or ""))
  return found


BLOCKS = blocks()


def shortened(block: Block) -> str:
  """The block with the arguments of its comment appended to each of our commands."""
  if block.language == "python" or block.directive != "run with":
    return block.text
  ours = ("python -m MaxText.", "python -m benchmarks.")
  return "\n".join(line + f" {block.detail}" * line.startswith(ours) for line in block.commands)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
  """Folder in which the blocks share their compiled programs."""
  return tmp_path_factory.mktemp("programs")


@pytest.fixture
def folder(tmp_path):
  """A writable folder in which the repository's files stand."""
  for entry in ("MaxText", "benchmarks", "docs", "scripts", "tests", "pyproject.toml", "setup.sh"):
    (tmp_path / entry).symlink_to(ROOT / entry)
  return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_runs(block, folder, programs):
  if block.directive == "not run":
    pytest.skip(f"{block.name} is not run: {block.detail}")
  text = shortened(block)
  command = (
    ["bash", "-euo", "pipefail", "-c", text] if block.language == "bash" else [sys.executable, "-c", text]
  )
  env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK, "JAX_COMPILATION_CACHE_DIR": str(programs)}
  env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
  compile_compactly(env)  # as the command does, so that a block finds the programs of the one before
  done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, f"{block.name}\n{done.stdout}\n{done.stderr}"


def unknown_words(command: str) -> list[str]:
  """Modules, scripts, keys and models of a command of ours that do not exist."""
  words = shlex.split(command, comments=True)
  if words[:1] == ["bash"]:
    return (
      [w for w in words[1:3] if w not in ("setup.sh", "decode", "test")] if words[1] == "setup.sh" else []
    )
  if words[:1] != ["python"]:
    return []
  if words[1] != "-m":
    return [word for word in words[1:2] if not (ROOT / word).is_file()]
  if not words[2].startswith(("MaxText.", "benchmarks.")):
    return []
  unknown = [words[2]] if not (ROOT / f"{words[2].replace('.', '/')}.py").is_file() else []
  known = set(schema.Config.model_fields).union(*(command.model_fields for command in options.COMMANDS))
  keys = [word.partition("=")[0] for word in words[3:] if "=" in word and word.partition("=")[0] not in known]
  if keys and words[2] in (
    "MaxText.train",
    "MaxText.sft",
  ):  # maxtext's own keys, checked where it is installed
    passed = compat.passed_keys() if importlib.util.find_spec("maxtext") else keys
    keys = [key for key in keys if key not in passed]
  return unknown + keys


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=lambda block: block.name)
def test_the_words_of_a_command_are_known(block):
  assert not [word for command in block.commands for word in unknown_words(command)]


def test_unknown_words_are_found():
  assert unknown_words("python -m MaxText.decoed kimi-k3") == ["MaxText.decoed"]
  assert unknown_words("python -m MaxText.configs.loader promt=x") == ["promt"]
  assert unknown_words("python -m benchmarks.absent --quick") == ["benchmarks.absent"]
  assert unknown_words("python tests/golden/absent.py") == ["tests/golden/absent.py"]
  assert unknown_words("bash setup.sh decoed") == ["decoed"]


def test_unknown_keys_of_training_are_found():
  pytest.importorskip("maxtext", reason="maxtext is not installed; pip install '.[train]' brings it")
  assert unknown_words("python -m MaxText.train kimi-k3-tiny muon_beta=1 muon_bta=1") == ["muon_bta"]


def test_the_readme_begins_with_the_two_commands():
  first = next(block for block in BLOCKS if block.name.startswith("README.md"))
  assert [shlex.split(command, comments=True) for command in first.commands] == [
    ["bash", "setup.sh", "decode"],
    ["bash", "setup.sh", "test"],
  ]


def missing_paths(document: Path, text: str) -> list[str]:
  """Relative links, and paths of the repository in backticks, that lead nowhere."""
  links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
  paths = re.findall(r"`((?:MaxText|tests|docs|benchmarks|scripts)/[\w./-]+)`", text)
  return [link for link in links if not (document.parent / link).exists()] + [
    path for path in paths if not (ROOT / path).exists()
  ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_paths_exist(document):
  assert not missing_paths(document, document.read_text())


def cited_sections(text: str) -> set[str]:
  """Sections of docs/spec.md that a source names: "spec 2.4", "spec section 8", "spec 9-D1"."""
  section = r"\d+(?:-D\d+|\.\d+)?"
  lists = re.findall(rf"\bspec (?:section )?({section}(?:, {section})*)", text)
  return set(", ".join(lists).split(", ")) - {""}


def test_every_cited_section_exists():
  text = (ROOT / "docs" / "spec.md").read_text()
  sections = set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", text, re.MULTILINE))
  sections |= {f"9-{name}" for name in re.findall(r"\*\*(D\d+)\.\*\*", text)}
  sources = (path.read_text() for folder in ("MaxText", "tests") for path in (ROOT / folder).rglob("*.py"))
  assert set().union(*map(cited_sections, sources)) - sections == set()


def test_cited_sections_are_found():
  assert cited_sections("spec 3.1 and spec section 8; spec 9-D1, spec 3, 3.1, 9-D7") == {
    *("3.1", "8", "9-D1", "3", "9-D7"),
  }


def test_missing_paths_are_found():
  assert missing_paths(ROOT / "README.md", "[a](docs/absent.md) `MaxText/absent.py` [b](https://x.org)") == [
    "docs/absent.md",
    "MaxText/absent.py",
  ]


@pytest.mark.parametrize("name", sorted(path.stem for path in loader.MODELS.glob("*.yml")))
def test_the_readme_names_every_model(name):
  assert f"`{name}`" in (ROOT / "README.md").read_text()
