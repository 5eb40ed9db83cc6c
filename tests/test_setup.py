"""`setup.sh` run with an interpreter that only notes what it was asked, and what the wheel has to contain."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Answers as a Python of $FAKE_VERSION would, writes pip calls to $PIP_LOG, and prints the module runs.
FAKE_PYTHON = """#!/bin/bash
case "$1 ${2:-}" in
  "-c import sys"*) [ "${FAKE_VERSION:-new}" = new ] ;;
  "-c import ensurepip"*) [ -z "${FAKE_LACKS_VENV:-}" ] ;;
  "-m venv") rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo "home = $0" >"$4/pyvenv.cfg" ;;
  "-m pip")
    echo "$*" >>"$PIP_LOG"
    echo "pip: ${FAKE_PIP_ERROR:=}" >&2
    [ -z "$FAKE_PIP_ERROR" ] ;;
  *) echo "cwd=$PWD"; printf '<%s>' "$@"; echo ;;
esac
"""


class Checkout:
  """A copy of the two files that set-up reads, and a PATH on which `python` is the stand-in."""

  def __init__(self, folder: Path):
    self.root = folder / "a checkout"
    self.log = folder / "pip.log"
    self.bin = folder / "bin"
    self.home = folder / "home"
    for path in (self.root, self.bin, self.home):
      path.mkdir()
    shutil.copy(ROOT / "setup.sh", self.root)
    (self.root / "pyproject.toml").write_text("[project]\n")
    for tool in ("bash", "dirname", "cat", "cksum", "rm", "mkdir", "cp"):
      (self.bin / tool).symlink_to(shutil.which(tool))

  def place_python(self, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)

  def run(self, *args: str, **env: str) -> subprocess.CompletedProcess:
    environment = {"PATH": str(self.bin), "HOME": str(self.home), "PIP_LOG": str(self.log), **env}
    command = ["bash", str(self.root / "setup.sh"), *args]
    return subprocess.run(command, env=environment, cwd=self.home, capture_output=True, text=True, timeout=30)

  @property
  def installs(self) -> list[str]:
    return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path):
  return Checkout(tmp_path)


@pytest.fixture
def with_python(checkout):
  checkout.place_python(checkout.bin / "python3")
  return checkout


def test_without_arguments_usage_is_printed_and_nothing_is_installed(with_python):
  run = with_python.run()
  assert run.returncode == 0 and run.stdout.startswith("usage: bash setup.sh decode")
  assert not with_python.installs and not (with_python.root / ".venv").exists()


def test_an_unknown_command_prints_usage_and_exits_2(with_python):
  run = with_python.run("deocde")
  assert run.returncode == 2 and "usage:" in run.stderr and not run.stdout


def test_decode_installs_the_core_once_and_runs_the_tiny_model(with_python):
  first, second = with_python.run("decode"), with_python.run("decode")
  assert (
    first.stdout
    == second.stdout
    == f"cwd={with_python.home}\n<-m><MaxText.decode><kimi-k3-tiny><prompt=def main(>\n"
  )
  assert len(with_python.installs) == 1 and with_python.installs[0].endswith(f"--editable {with_python.root}")
  assert not second.stderr


def test_arguments_reach_the_decoder_unchanged(with_python):
  run = with_python.run("decode", "kimi-k3", "checkpoint=a dir", "prompt=x = 'é' $HOME", "top_k=3")
  assert "<MaxText.decode><kimi-k3><checkpoint=a dir><prompt=x = 'é' $HOME><top_k=3>" in run.stdout


@pytest.mark.parametrize("given", ["prompt=x", "prompt_ids=1,2", "prompts_file=f"])
def test_a_given_prompt_replaces_the_default_one(with_python, given):
  assert f"<kimi-k3-tiny><{given}>" in with_python.run("decode", given).stdout


def test_tests_run_in_the_checkout_with_their_extra(with_python):
  run = with_python.run("test", "-x", "tests/test_setup.py")
  started, given = run.stdout.split("<pytest>")
  assert started == f"cwd={with_python.root}\n<-m>"
  assert (
    given
    == "<-n><auto><--maxprocesses><4><--dist><loadfile><--no-loadscope-reorder><-x><tests/test_setup.py>\n"
  )
  assert with_python.installs[0].endswith(f"--editable {with_python.root}[dev]")


def test_tests_install_jetstream_as_its_extra_says_but_without_its_requirements(with_python):
  with_python.run("test")
  extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
  assert with_python.installs[1].split()[-2:] == ["--no-deps", *extras["jetstream"]]
  assert len(with_python.installs) == 2 and "jetstream-slim" in extras["dev"][0]


def test_decode_after_test_installs_nothing(with_python):
  with_python.run("test")
  installs = with_python.installs
  with_python.run("decode")
  assert with_python.installs == installs


def test_a_changed_requirement_installs_again(with_python):
  with_python.run("decode")
  (with_python.root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
  with_python.run("decode")
  assert len(with_python.installs) == 2


def test_a_failed_installation_shows_its_error_and_is_done_again(with_python):
  failed = with_python.run("decode", FAKE_PIP_ERROR="no matching distribution")
  assert failed.returncode == 1 and not failed.stdout
  assert "pip: no matching distribution" in failed.stderr and "the installation failed" in failed.stderr
  assert with_python.run("decode").returncode == 0
  assert len(with_python.installs) == 2


def test_a_virtual_environment_without_an_interpreter_is_made_again(with_python):
  with_python.run("decode")
  (with_python.root / ".venv" / "bin" / "python").unlink()
  assert with_python.run("decode").returncode == 0
  assert len(with_python.installs) == 2


def test_an_interpreter_under_pyenv_is_found(checkout):
  checkout.place_python(checkout.home / ".pyenv" / "versions" / "3.13.0" / "bin" / "python")
  assert checkout.run("decode").returncode == 0
  checkout.run("decode", "prompt=x", PYENV_ROOT="/nowhere")  # already installed: no interpreter is looked for
  assert len(checkout.installs) == 1


def test_a_missing_interpreter_is_one_line_on_stderr(checkout):
  run = checkout.run("decode")
  assert (run.returncode, run.stdout) == (1, "")
  assert run.stderr.count("\n") == 1 and "Python 3.12 or later is missing" in run.stderr


def test_an_old_interpreter_counts_as_missing(with_python):
  run = with_python.run("test", FAKE_VERSION="old")
  assert run.returncode == 1 and "Python 3.12 or later is missing" in run.stderr


def test_an_interpreter_that_cannot_make_environments_is_named(with_python):
  run = with_python.run("decode", FAKE_LACKS_VENV="1")
  assert run.returncode == 1 and f"{with_python.bin}/python3 cannot make virtual environments" in run.stderr


def test_the_continuous_check_is_the_test_command():
  assert "bash setup.sh test" in (ROOT / ".ci" / "run").read_text()
  for script in (ROOT / "setup.sh", ROOT / ".ci" / "run"):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """File names in the wheel of this checkout, built without the network from a copy of its sources."""
  pytest.importorskip("setuptools", minversion="77")
  source = tmp_path_factory.mktemp("wheel")
  shutil.copytree(ROOT / "MaxText", source / "MaxText", ignore=shutil.ignore_patterns("__pycache__"))
  for name in ("tests", "benchmarks"):
    (source / name).mkdir()
    (source / name / "__init__.py").touch()
  for name in ("pyproject.toml", "README.md"):
    shutil.copy(ROOT / name, source)
  build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
  env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
  done = subprocess.run(
    [sys.executable, "-c", build], cwd=source, env=env, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  with zipfile.ZipFile(source / done.stdout.split()[-1]) as archive:
    return archive.namelist()


def test_the_wheel_contains_every_file_of_the_package(wheel):
  kept = (
    path for path in (ROOT / "MaxText").rglob("*") if path.is_file() and "__pycache__" not in path.parts
  )
  assert {path.relative_to(ROOT).as_posix() for path in kept} - set(wheel) == set()


def test_the_wheel_installs_only_the_package(wheel):
  assert {name.split("/")[0] for name in wheel} == {"MaxText", "maxtext_kimi_k3-0.1.0.dist-info"}
