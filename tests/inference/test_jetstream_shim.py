"""JetStream imports without TensorFlow and quietly; where it is not installed, one line says what to do."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from MaxText.inference import jetstream_server, jetstream_shim

ROOT = Path(__file__).parents[2]
PROGRAM = """
import logging, sys
import jax
assert not hasattr(jax, "tree_map")
before = (logging.getLogger().level, list(logging.getLogger().handlers))
from MaxText.inference import jetstream_shim
jetstream = jetstream_shim.load()
assert jetstream_shim.load() == jetstream
assert before == (logging.getLogger().level, list(logging.getLogger().handlers))
assert jax.tree_map(lambda x: x + 1, {"a": 1}) == {"a": 2}
absent = [name for name in sys.modules if name.split(".")[0] in ("seqio", "tensorflow", "tensorflow_text")]
assert not absent, absent
from jetstream.engine import token_utils
assert token_utils.pad_tokens([5, 7], -1, 0, max_prefill_length=16, jax_padding=False)[1] == 3
try:
  token_utils.load_vocab("a.model")
except ModuleNotFoundError as lacking:
  print(lacking)
"""


def test_jetstream_imports_without_tensorflow_and_keeps_the_log_as_it_was():
  pytest.importorskip("jetstream", reason="google-jetstream is not installed")
  if importlib.util.find_spec("seqio"):
    pytest.skip("seqio is installed, and TensorFlow with it")
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == "seqio is not installed; JetStream's own vocabularies need it\n" and not done.stderr


@pytest.mark.parametrize("lacking", ["jetstream", "grpc", "shortuuid"])
def test_what_is_not_installed_is_told_with_both_ways_to_install_it(lacking, monkeypatch, capsys):
  for name in [name for name in sys.modules if name.split(".")[0] == "jetstream"]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setitem(sys.modules, lacking, None)
  assert jetstream_server.main(["kimi-k3-tiny"]) == 2
  [line] = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: {lacking} is not installed; the JetStream server needs: ")
  assert 'pip install "maxtext-kimi-k3[jetstream]" (3.2 GB' in line
  assert '"maxtext-kimi-k3[jetstream-slim]" && pip install --no-deps google-jetstream==0.2.2' in line


@pytest.mark.parametrize(
  "failure", [ImportError("cannot import name 'x'"), TypeError("Descriptors\n are old")]
)
def test_a_version_that_does_not_fit_is_one_line(failure, monkeypatch, capsys):
  """protobuf's generated code raises what it likes, over several lines."""

  def fail(name, *_):
    raise failure

  for name in [name for name in sys.modules if name.split(".")[0] == "jetstream"]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=fail), *sys.meta_path])
  assert jetstream_server.main(["kimi-k3-tiny"]) == 2
  [line] = capsys.readouterr().err.splitlines()
  told = f"{type(failure).__name__}: {' '.join(str(failure).split())}; the JetStream server needs: "
  assert line.startswith(f"error: JetStream cannot be imported: {told}")


def test_one_release_of_jetstream_is_named_everywhere():
  texts = {
    name: (ROOT / name).read_text("utf-8") for name in ("setup.sh", "pyproject.toml", "docs/serving.md")
  }
  texts |= {"help": jetstream_server.HELP, "shim": jetstream_shim.DISTRIBUTION}
  for name, text in texts.items():
    assert set(re.findall(r"google-jetstream==[\w.]+\b", text)) == {jetstream_shim.DISTRIBUTION}, name


def test_a_vocabulary_of_seqio_cannot_be_opened():
  with pytest.raises(ModuleNotFoundError, match="seqio is not installed"):
    jetstream_shim.SeqioVocabulary("a.model", extra_ids=0)
