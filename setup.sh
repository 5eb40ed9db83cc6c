#!/usr/bin/env bash
# Installs the project into .venv beside this file, then runs it.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash setup.sh decode [CONFIG] [key=value ...]   print text from a model (default: the bundled kimi-k3-tiny)
       bash setup.sh test [pytest arguments ...]       run the tests

The first run installs into .venv beside this file (Python 3.12 or later, from PATH or pyenv). Later runs install nothing.
  bash setup.sh decode prompt="import " max_new_tokens=32
  bash setup.sh decode kimi-k3 checkpoint=DIR prompt="Hello"
  bash setup.sh decode --help
EOF
}

fail() {
  echo "setup.sh: $*" >&2
  exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
python=$venv/bin/python

# Every place an interpreter may be, the versions that the tests ran on first. A pyenv shim on PATH may exist and
# yet refuse to run, so each candidate is asked rather than believed.
candidates() {
  local name pyenv=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}
  for name in python3.12 python3.13 python3.14 python3 python; do
    command -v "$name" || true
  done
  for name in "$pyenv"/versions/3.12*/bin/python "$pyenv"/versions/*/bin/python; do
    if [ -x "$name" ]; then echo "$name"; fi
  done
}

find_python() {
  local candidate without_venv=""
  while read -r candidate; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null </dev/null || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
      echo "$candidate"
      return
    fi
    without_venv=$candidate
  done <<EOF
$(candidates)
EOF
  if [ -n "$without_venv" ]; then
    fail "$without_venv cannot make virtual environments; install its venv package (Debian: python3-venv)"
  fi
  fail "Python 3.12 or later is missing, on PATH and under pyenv; install it (https://www.python.org) and run this again"
}

# What an installation depends on: the requirements, the interpreter, and the place it is installed from.
fingerprint() {
  { echo "$root"; cat "$root/pyproject.toml" "$venv/pyvenv.cfg"; } | cksum
}

installed() {
  local stamp=$venv/.installed-$1
  [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]
}

# install NAME REQUIREMENT [BARE]: BARE is a package that goes on top without its own requirements.
# The stamp is written last, so an interrupted installation is done again.
install() {
  local base
  if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    base=$(find_python)
    "$base" -m venv --clear "$venv"
  fi
  rm -f "$venv/.installed-$1"
  echo "setup.sh: installing into $venv (once: 1 to 2 GB, some minutes)" >&2
  # editable: the checkout is what runs, and on a case-insensitive disk it never meets a package named maxtext
  pip_install --editable "$2"
  if [ $# -gt 2 ]; then pip_install --no-deps "$3"; fi
  fingerprint >"$venv/.installed-$1"
}

pip_install() {
  local output
  output=$("$python" -m pip install --disable-pip-version-check "$@" 2>&1) ||
    fail "the installation failed:"$'\n'"$output"
}

# The arguments of the decoder, with the bundled model and a prompt where the user names none.
decode() {
  local argument model=kimi-k3-tiny prompt='prompt=def main('
  case ${1:-} in
    '' | -* | *=*) ;;
    *) model=$1; shift ;;
  esac
  for argument; do
    case $argument in prompt=* | prompt_ids=* | prompts_file=*) prompt="" ;; esac
  done
  exec "$python" -m MaxText.decode "$model" ${prompt:+"$prompt"} "$@"
}

command=${1:-}
if [ $# -gt 0 ]; then shift; fi
case $command in
  decode)
    installed dev || installed core || install core "$root"  # the tests' installation contains the decoder's
    decode "$@"
    ;;
  test)
    # JetStream's own requirements bring TensorFlow, which nothing here needs
    installed dev || install dev "${root}[dev]" google-jetstream==0.2.2
    cd "$root"
    # a file's tests share what they compile, so a file stays with one process
    exec "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
    ;;
  '' | -h | --help)
    usage
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac
