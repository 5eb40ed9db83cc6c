"""The benchmarks start, gate and report; the figures themselves belong to no test."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import kernels, serving, serving_checkpoint
from benchmarks.clients import Answer, complete, drive
from MaxText.kernels.short_conv import cases
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.vocabulary import write_vocabulary

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


STARTS = [("-m", "benchmarks.run"), ("benchmarks/run.py",), ("-m", "benchmarks.serving")]


@pytest.mark.parametrize("start", STARTS, ids=" ".join)
def test_the_benchmark_starts_as_a_module_and_as_a_file(start):
  done = subprocess.run([sys.executable, *start, "--help"], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0 and "--quick" in done.stdout, done.stderr


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
  assert figures["tokens_per_second"] == {"median": 5.0, "min": 2.5, "max": 10.0}
  assert figures["ttft_ms"] == {"p50": 200.0, "p99": 300.0}
