"""The benchmarks start, gate and report; the figures themselves belong to no test."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import kernels, servers, serving, serving_checkpoint, training
from benchmarks.clients import Answer, complete, drive
from benchmarks.report import report
from MaxText.kernels.short_conv import cases
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.vocabulary import write_vocabulary
from tests.reference.generator import k3_config_json, write_checkpoint

ROOT = Path(__file__).parents[1]


@pytest.fixture
def small_shapes(monkeypatch):
  monkeypatch.setattr(cases, "SPEED_SHAPES", {"small": (1, 8, (3, 4))})


def test_a_kernel_benchmark_prints_one_line_an_implementation(small_shapes, capsys):
  assert kernels.main(["short_conv"]) == 0
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [line["impl"] for line in lines] == ["reference", "shifted"]
  assert all(line["error"] <= kernels.TOLERANCE and line["median_ms"] > 0 for line in lines)


def test_an_implementation_that_disagrees_is_not_timed(small_shapes, monkeypatch, capsys):
  monkeypatch.setattr(kernels, "relative_error", lambda got, want: 1.0)
  assert kernels.main(["short_conv"]) == 1
  assert all("median_ms" not in json.loads(line) for line in capsys.readouterr().out.splitlines())


STARTS = {
  ("-m", "benchmarks.run"): "--quick",
  ("benchmarks/run.py",): "--quick",
  ("-m", "benchmarks.serving"): "--quick",
  ("-m", "benchmarks.training"): "--tokens",
}


@pytest.mark.parametrize("start, option", STARTS.items(), ids=map(" ".join, STARTS))
def test_the_benchmark_starts_as_a_module_and_as_a_file(start, option):
  done = subprocess.run([sys.executable, *start, "--help"], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0 and option in done.stdout, done.stderr


def test_figures_are_appended_with_where_they_were_measured(tmp_path, capsys):
  output = tmp_path / "results.jsonl"
  for name, passed in (("one", True), ("two", False)):
    report([{"figure": name, "passed": passed}], output, peer="mine 1.0")
  assert capsys.readouterr().out.splitlines() == [
    'pass {"figure": "one", "passed": true}',
    'FAIL {"figure": "two", "passed": false}',
  ]
  lines = [json.loads(line) for line in output.read_text().splitlines()]
  assert [line["figure"] for line in lines] == ["one", "two"]
  assert all(line["peer"] == "mine 1.0" and line["platform"] == "cpu" and line["jax"] for line in lines)


@pytest.fixture
def small_model(tmp_path, monkeypatch):
  """One layer of linear attention in place of the bundled model, with its vocabulary."""
  for name in ("tiktoken.model", "tokenizer_config.json"):
    (tmp_path / name).symlink_to(training.TINY / name)
  shape = dict(num_hidden_layers=1, full_attn_layers=(), vocab_size=1024)
  write_checkpoint(tmp_path, k3_config_json(**shape), seed=3, dtype="f32")
  monkeypatch.setattr(training, "TINY", tmp_path)


def test_both_forms_of_training_are_compared_then_timed(small_model, capsys):
  assert training.main(["--tokens", "8"]) == 0
  figures = json.loads(capsys.readouterr().out)
  assert figures["passed"] and figures["tokens"] == 8 and 0 <= figures["gradient_error"] <= training.TOLERANCE
  for each in ("temporary_bytes", "tokens_per_second"):
    assert figures[each].keys() == {"reference", "chunked"}


def test_gradients_that_disagree_fail_the_run(monkeypatch, capsys):
  monkeypatch.setattr(training, "figures", lambda tokens: {"tokens": tokens, "passed": False})
  assert training.main(["--tokens", "8"]) == 1
  gradients = {"w": np.array([1.0, -2.0])}, {"w": np.array([1.5, -2.0])}
  assert training.difference(*gradients) == 0.25


# --- the comparison of servers -----------------------------------------------------------------------------


def test_both_forms_of_the_vocabulary_give_the_same_ids(tmp_path):
  tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, of the extra [train], is not installed")
  ranks = serving_checkpoint.vocabulary(8192 - 256)
  write_vocabulary(tmp_path, ranks)
  ours = KimiTokenizer.from_directory(tmp_path, 8192)
  names = serving_checkpoint.special_names(tmp_path)
  theirs = tokenizers.Tokenizer.from_str(json.dumps(serving_checkpoint.tokenizer_json(ranks, names)))
  assert theirs.get_vocab_size() == 8192
  for text in islice(serving.prompts(seed=5), 20):
    ids = ours.encode(text)
    assert theirs.encode(text).ids == ids and len(ids) < len(text)
    assert theirs.decode(ids) == ours.decode(ids) == text
  printable = [token for token in ranks if all(32 <= byte < 127 for byte in token)]
  assert len(printable) > 0.97 * len(ranks)


class Scripted(BaseHTTPRequestHandler):
  """Streams the prompt back, a letter an event, as both servers would."""

  protocol_version = "HTTP/1.0"

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    if body["prompt"] == "bad":
      self.send_error(400)
      return
    assert self.path == "/v1/completions" and body["stream"] and body["temperature"] == 0
    self.send_response(200)
    self.end_headers()
    texts = [{"choices": [{"text": letter}]} for letter in body["prompt"][: body["max_tokens"]]]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(texts)}
    events = [{"choices": [{"text": ""}]}, *texts, {"choices": [], "usage": usage}]
    lines = [": keepalive 1/2", *(f"data: {json.dumps(event)}" for event in events), "data: [DONE]"]
    self.wfile.write("\n\n".join(lines).encode())

  def log_message(self, *_):
    pass


@pytest.fixture
def port():
  server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  yield server.server_port
  server.shutdown()
  server.server_close()


def test_a_client_counts_what_the_server_counts(port):
  answer = complete(port, "hello", 3)
  assert (answer.text, answer.prompt_tokens, answer.new_tokens) == ("hel", 5, 3)
  assert 0 < answer.first <= answer.seconds


def test_clients_ask_at_once_and_all_answers_come_back(port):
  seconds, answers = drive(port, [["ab", "cd"], ["ef"]], 2)
  assert sorted(answer.text for answer in answers) == ["ab", "cd", "ef"]
  assert seconds >= max(answer.seconds for answer in answers)


def test_an_answer_that_is_refused_ends_the_run(port):
  with pytest.raises(RuntimeError, match="status 400"):
    drive(port, [["ab"], ["bad"]], 2)


def test_figures_of_a_side_are_tokens_over_time_and_percentiles_of_all_rounds():
  answers = [Answer("x", 4, 10, first, 1.0) for first in (0.1, 0.3)]
  figures = serving.side([(2.0, answers), (4.0, answers), (8.0, answers)])
  assert figures["new_tokens"] == 60
  assert figures["tokens_per_second"] == {"median": 5.0, "min": 2.5, "max": 10.0}
  assert figures["ttft_ms"] == {"p50": 200.0, "p99": 300.0}


class Told:
  """A server that notes what becomes of it."""

  def __init__(self, name, ended):
    self.name, self._ended = name, ended

  def close(self):
    self._ended.append(self.name)
    raise RuntimeError(f"{self.name} does not end")


def test_both_servers_are_ended_where_ending_one_fails(tmp_path, monkeypatch):
  ended = []
  monkeypatch.setattr(serving, "serving_checkpoints", lambda workdir: (workdir, workdir))
  monkeypatch.setattr(serving, "peer_python", lambda workdir: workdir)
  monkeypatch.setattr(serving, "our_server", lambda *_: Told("ours", ended))
  monkeypatch.setattr(serving, "mlx_server", lambda *_: Told("mlx_lm", ended))
  monkeypatch.setattr(serving, "gate", lambda servers: {"passed": False})
  with pytest.raises(RuntimeError, match="ours does not end"):
    serving.main(["--workdir", str(tmp_path)])
  assert ended == ["mlx_lm", "ours"]


def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path, monkeypatch):
  monkeypatch.delenv("OF_THE_TEST", raising=False)
  words = [sys.executable, "-c", "import os; print('it is', os.environ['OF_THE_TEST'])"]
  with pytest.raises(RuntimeError, match="it does not start.*\n.*it is so"):
    servers.Server("it", words, servers.free_port(), "/", tmp_path / "log", OF_THE_TEST="so")
  assert "OF_THE_TEST" not in os.environ
