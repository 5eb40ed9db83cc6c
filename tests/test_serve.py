"""`python -m MaxText.serve`: the bundled model through OpenAI's client, one-line mistakes, a clean end."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from MaxText import serve
from MaxText.configs.loader import load_command
from MaxText.configs.options import ServeOptions
from MaxText.inference.prompts import Settings
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference.served import httpx, sample, serving
from tests.locations import TINY

pytestmark = pytest.mark.usefixtures("kept_programs")
ROOT = Path(__file__).parents[1]
# tests/inference/test_jetstream_server.py has an engine of the same shapes, and so the same programs
KEYS = ["slots=3", "pages=48", "page_size=16", "prefill_chunk=16", "scan_layers=true", "seed=3"]
PROMPTS = ["def main(", "import ", "尼罗河 😀 = ", "class A:\n  def __init__(self"]
NEW = 12
MARGIN = 1e-4


@pytest.fixture(scope="module")
def loaded():
  """The bundled model as the command loads it."""
  cfg, options = load_command("kimi-k3-tiny", KEYS, ServeOptions)
  model, engine = serve.load("kimi-k3-tiny", cfg, options, 256, options.pages)
  return model, engine


@pytest.fixture(scope="module")
def solo(loaded):
  """Ids of each prompt and of its answer, alone in the engine; no choice hangs on a rounding error."""
  model, engine = loaded
  engine.warm_up()
  answers = {}
  for prompt in PROMPTS:
    ids = model.tokenizer.encode(prompt)
    slot = engine.insert(len(ids), Settings(max_new_tokens=NEW, logprobs=2), model.stop_ids)
    for start in range(0, len(ids), 16):
      engine.prefill_chunk(slot, ids[start : start + 16])
    picked = [engine.begin(slot)]
    while engine.active[slot]:
      picked.append(engine.decode())
    engine.reset_slot(slot)
    top = np.array([step.top_logprobs[slot, 0, :2] for step in picked])
    assert np.min(top[:, 0] - top[:, 1]) > MARGIN
    answers[prompt] = (ids, [int(step.token[slot, 0]) for step in picked])
  return answers


@pytest.fixture(scope="module")
def server(loaded, solo):
  model, engine = loaded  # which only the server may touch from here on
  with serving(engine, model.tokenizer, model.stop_ids, queue_limit=16) as served:
    yield served


def test_served_answers_are_the_solo_ones_and_metrics_are_the_truth(server, solo):
  """Greedy, eight at a time on three slots, whole and streamed."""
  before = server.engine.program_count
  results, truth = {}, {"generated": 0, "prompt": 0, "stop": 0, "length": 0}

  def ask(prompt, stream):
    given = dict(model="tiny", prompt=prompt, max_tokens=NEW, temperature=0)
    if stream:
      options = {"include_usage": True}
      chunks = list(server.client.completions.create(**given, stream=True, stream_options=options))
      text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
      reason = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason][0]
      results[prompt, stream] = (text, reason, chunks[-1].usage)
    else:
      answer = server.client.completions.create(**given)
      results[prompt, stream] = (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage)

  threads = [threading.Thread(target=ask, args=(p, stream)) for p in PROMPTS for stream in (False, True)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(120)
  for (prompt, _), (text, reason, usage) in results.items():
    ids, answer = solo[prompt]
    is_stopped = answer[-1] in server.model.stop_ids
    assert text == server.tokenizer.decode(answer[: len(answer) - is_stopped])
    assert reason == ("stop" if is_stopped else "length")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(answer))
    truth["generated"] += usage.completion_tokens
    truth["prompt"] += usage.prompt_tokens
    truth[reason] += 1
  assert len(results) == 8 and server.engine.program_count == before
  told = {
    "maxtext_requests_total": 8,
    "maxtext_generated_tokens_total": truth["generated"],
    "maxtext_prompt_tokens_total": truth["prompt"],
    'maxtext_requests_finished_total{reason="stop"}': truth["stop"],
    'maxtext_requests_finished_total{reason="length"}': truth["length"],
    'maxtext_requests_finished_total{reason="error"}': 0,
    "maxtext_time_to_first_token_seconds_count": 8,
    "maxtext_inter_token_seconds_count": truth["generated"] - 8,
    "maxtext_request_seconds_count": 8,
    "maxtext_not_finite_total": 0,
    "maxtext_requests_waiting": 0,
    "maxtext_requests_running": 0,
    "maxtext_slots_used": 0,
    "maxtext_slots_free": 3,
    "maxtext_pages_used": 0,
    "maxtext_pages_free": 48,
  }
  assert {name: sample(server.metrics, name) for name in told} == told
  assert httpx.get(f"{server.url}/metrics").text.startswith("# HELP")
  # three slots for eight at once: most of them wait, and that counts
  mean = sample(server.metrics, "maxtext_time_to_first_token_seconds_sum") / 8
  assert mean > sample(server.metrics, "maxtext_inter_token_seconds_sum") / truth["generated"]


def test_a_seed_gives_the_same_chat_again(server):
  ask = lambda seed: server.client.chat.completions.create(
    model="tiny", messages=[{"role": "user", "content": "Hi"}], seed=seed, max_tokens=16, n=2
  )
  first, again, other = ask(5), ask(5), ask(77)
  text = lambda answer: [choice.message.model_dump() for choice in answer.choices]
  assert text(first) == text(again) != text(other)
  assert text(first)[0] != text(first)[1]
  assert first.usage.completion_tokens == 32 or "stop" in {c.finish_reason for c in first.choices}


def test_a_chat_of_the_model_is_the_same_whole_and_streamed(server):
  given = dict(model="tiny", messages=[{"role": "user", "content": "Hi"}], seed=5, max_tokens=16)
  whole = server.client.chat.completions.create(**given).choices[0]
  deltas = [c for chunk in server.client.chat.completions.create(**given, stream=True) for c in chunk.choices]
  for field in ("content", "reasoning_content"):
    streamed = "".join(getattr(c.delta, field, None) or "" for c in deltas)
    assert streamed == (getattr(whole.message, field, None) or "")
  assert [c.finish_reason for c in deltas if c.finish_reason] == [whole.finish_reason]


# --- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "arguments, words",
  [
    ([], "CONFIG is missing"),
    (["kimi-k3-tiny", "slts=1"], "did you mean 'slots'"),
    (["kimi-k3-tiny", "host=no.such.host.invalid"], "host, port: cannot listen on no.such.host.invalid:8000"),
    (["kimi-k3-tiny", "api_key=a", "api_key_file=b"], "api_key: excludes api_key_file"),
    (["kimi-k3-tiny", "api_key_file=/no/such/file"], "api_key_file: /no/such/file: No such file"),
    (["kimi-k3-tiny", "port=0", "vocab_size=2000"], "serving needs a tokenizer"),
    (["kimi-k3-tiny", "mesh=cpu8"], "mesh: cpu8: no such file or mesh, did you mean 'cpu-8'?"),
    (["kimi-k3-tiny", "ici_data_parallelism=2"], "ici_data_parallelism: needs a mesh to change"),
    (
      ["kimi-k3-tiny", "mesh=cpu-8", "slots=6"],
      "mesh cpu-8: slots=6 does not divide over 4 ranks; nearest that do: 4 or 8",
    ),
    (
      ["kimi-k3-tiny", "mesh=cpu-8", "pages=30"],
      "mesh cpu-8: pages=30 does not divide over 4 ranks; nearest that do: 28 or 32",
    ),
    (
      ["kimi-k3-tiny", "moe_dispatch=ragged_all_to_all", "moe_capacity_factor=1.0"],
      "moe_capacity_factor: an answer may not depend on its neighbours",
    ),
  ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
  assert serve.main(arguments) == 2
  assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
  "keys, is_open",
  [(["host=127.0.0.1"], False), (["host=0.0.0.0"], True), (["host=0.0.0.0", "api_key=a"], False)],
)
def test_a_server_that_strangers_may_ask_says_so(keys, is_open, capsys):
  assert (
    serve.main(["kimi-k3-tiny", "port=0", *keys, "vocab_size=2000"]) == 2
  )  # told before anything is loaded
  warning = (
    "WARNING: host=0.0.0.0: anybody who reaches it may ask; api_key_file=FILE has a key that they must know"
  )
  assert capsys.readouterr().err.splitlines()[:-1] == [warning] * is_open


def test_a_port_that_is_taken_is_told(server, capsys):
  port = server.url.rpartition(":")[2]
  assert serve.main(["kimi-k3-tiny", f"port={port}"]) == 2
  assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_what_is_not_installed_is_told(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "fastapi", None)
  assert serve.main(["kimi-k3-tiny"]) == 2
  assert 'fastapi is not installed; the server needs: pip install "maxtext-kimi-k3[serve]"' in (
    capsys.readouterr().err
  )


def test_help_tells_every_key(capsys):
  assert serve.main(["--help"]) == 0
  text = capsys.readouterr().out
  assert all(f"    {key}=" in text for key in ServeOptions.model_fields)


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from MaxText import serve
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference.scripted_engine import ScriptedEngine
from tests.inference.served import Served
from tests.locations import TINY
engine = ScriptedEngine()
engine.seconds = 0.05
tokenizer = KimiTokenizer.from_directory(TINY)
engine.answers = [[*tokenizer.encode("a" * 30), 769]]
served = Served(engine, tokenizer, [769])
listener = serve._listener("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
served.scheduler.start()
serve._run(served.app, served.scheduler, listener, 10)
assert engine.resources.used_slots == 0
"""


def test_sigterm_lets_requests_end_and_takes_no_more():
  process = subprocess.Popen(
    [sys.executable, "-c", PROGRAM.format(root=str(ROOT))],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
      lines = stream.iter_lines()
      next(lines)
      process.send_signal(signal.SIGTERM)
      process.stderr.readline()  # it says that it drains
      assert httpx.get(f"{url}/ready").status_code == 503
      assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
      rest = "\n".join(lines)
    assert '"finish_reason": "stop"' in rest and rest.rstrip().endswith("[DONE]")
    assert process.wait(15) == 0, process.stderr.read()
  finally:
    process.kill()


@pytest.mark.slow  # compiles every program for eight devices, in a process of its own
def test_the_command_serves_on_a_mesh(solo):
  keys = [key for key in KEYS if not key.startswith(("slots", "pages"))]
  keys += ["mesh=cpu-8", "slots=4", "pages=24", "port=0", "max_target_length=256"]
  process = subprocess.Popen(
    [sys.executable, "-m", "MaxText.serve", "kimi-k3-tiny", *keys],
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  )
  try:
    told = []
    while not told or not told[-1].startswith("ready after"):
      told.append(process.stderr.readline())
      assert told[-1], told  # it still runs
    assert any(line.startswith("mesh cpu-8: fsdp 2 x expert 2 x tensor 2") for line in told)
    assert any(line.endswith("96 of each, in 4 ranks that share neither\n") for line in told)
    url = re.search(r"http://\S+", "".join(told))[0]
    tokenizer = KimiTokenizer.from_directory(TINY)
    for prompt, (_, answer) in solo.items():
      given = dict(model="kimi-k3-tiny", prompt=prompt, max_tokens=NEW, temperature=0)
      [choice] = httpx.post(f"{url}/v1/completions", json=given, timeout=120).json()["choices"]
      is_stopped = choice["finish_reason"] == "stop"
      assert choice["text"] == tokenizer.decode(answer[: len(answer) - is_stopped])
    metrics = httpx.get(f"{url}/metrics").text
    assert "maxtext_slots_free 4.0" in metrics and "maxtext_pages_free 24.0" in metrics
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
  finally:
    process.kill()
