"""JetStream's server around our engine, asked by JetStream's own client: limits, refusals, failures, text."""

import asyncio
import os
import queue
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from MaxText import serve
from MaxText.common.command import EXIT_INTERRUPTED
from MaxText.configs.loader import load_command
from MaxText.configs.options import JetStreamOptions, ServeOptions
from MaxText.inference import jetstream_server, jetstream_service
from MaxText.inference.compile_cache import BACKEND_OPTIONS
from MaxText.inference.loading import Loaded
from MaxText.inference.prompts import Settings
from MaxText.inference.serving import Ended, Job
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference import echo_engine
from tests.inference.jetstream_process import COMMAND, JETSTREAM, echo_program, running, starting
from tests.inference.served import serving
from tests.locations import TINY

TOKENIZER = KimiTokenizer.from_directory(TINY)
INVALID, INTERNAL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL


@pytest.fixture(scope="module")
def echo():
  """A server whose engine answers a prompt with its own ids; two requests at a time."""
  with running(echo_program()) as server:
    yield server
    status = server.stop()
    assert status == 0, "".join(server.log)


def test_it_is_alive_and_says_what_it_holds(echo):
  assert echo.stub.HealthCheck(JETSTREAM.messages.HealthCheckRequest()).is_live
  assert "2 requests at a time, prompts of up to 63 tokens" in "".join(echo.log)


@pytest.mark.parametrize("limit", [0, 1, 2, 7])
def test_exactly_as_many_tokens_come_as_were_asked_for(echo, limit):
  prompt = "def main(argv: list[str]) -> int:"
  ids = TOKENIZER.encode(prompt)
  answer = echo.ask(prompt, limit)
  assert answer == (ids[:limit], TOKENIZER.decode(ids[:limit]), None, "")
  assert echo.ask(ids, limit) == (ids[:limit], "", None, "")  # ids are answered with ids


def test_text_is_put_together_from_the_bytes_of_all_tokens(echo):
  for prompt in ("尼罗河 😀 naïve", "🙂", "שלום <|open|>tools<|sep|>", "a\ufffdb"):
    ids = TOKENIZER.encode(prompt)
    assert any("\ufffd" in TOKENIZER.decode([token]) for token in ids)  # one by one they are no text
    assert echo.ask(prompt) == (ids, prompt, None, "")
  cut = echo.ask("🙂", 2)
  assert cut.text == TOKENIZER.decode(cut.ids) == "\ufffd"  # an answer that really ends within a character


def test_requests_of_unequal_length_are_answered_side_by_side(echo):
  asked = [("x = " + "尼罗河" * (n % 3) + "y" * n, 30 - n) for n in range(16)]
  answers = echo.ask_all(*asked)
  for (prompt, limit), answer in zip(asked, answers):
    ids = TOKENIZER.encode(prompt)[:limit]
    assert answer == (ids, TOKENIZER.decode(ids), None, "")


@pytest.mark.parametrize(
  "prompt, words",
  [
    ("", "prompt: got 0 tokens, expected 1 to 63"),
    ([], "prompt: got 0 tokens, expected 1 to 63"),
    ([5] * 64, "prompt: got 64 tokens, expected 1 to 63"),
    ("\n\n" + "x y " * 100, "tokens, expected 1 to 63"),
    ([5, 1024], "prompt: token id 1024: outside the vocabulary, expected 0 to 1023"),
    ([5, -1], "prompt: token id -1: outside the vocabulary, expected 0 to 1023"),
    (None, "content: missing, expected text_content or token_content"),
  ],
)
def test_a_prompt_that_cannot_be_answered_is_refused_while_others_go_on(echo, prompt, words):
  other, refused = echo.ask_all(([4] * 20,), (prompt,))
  assert (refused.ids, refused.code) == ([], INVALID) and words in refused.details
  assert other == ([4] * 20, "", None, "")
  assert echo.ask([7] * 63).ids == [7]  # the longest prompt leaves room for one token


def test_fields_that_are_not_served_are_refused(echo):
  assert echo.ask("a", -1).details == "max_tokens: got -1, expected a whole number >= 0"
  for field, value in (("priority", 3), ("session_cache", "s")):
    answer = echo.ask("a", **{field: value})
    assert (
      answer.code is INVALID and f"{field}: got {value!r}, but only has_bos, max_tokens" in answer.details
    )


def test_an_exception_in_the_engine_ends_its_request_and_not_the_process(echo):
  failed = "the engine failed on this request; the server's log says how"
  for bad in (echo_engine.PREFILL_FAILS, echo_engine.DECODE_FAILS, echo_engine.STATE_IS_LOST):
    answer = echo.ask([bad, 5])
    assert (answer.code, answer.details) == (INTERNAL, failed)
    assert echo.ask("still here").text == "still here"
  answer = echo.ask([echo_engine.NOT_A_NUMBER, 5])
  assert (answer.ids, answer.code, answer.details) == (
    [echo_engine.NOT_A_NUMBER],
    INTERNAL,
    "the model's logits are not finite",
  )
  assert echo.process.poll() is None and "the prompt cannot be read" in "".join(echo.log)


def test_an_answer_that_ends_at_once_is_empty(echo):
  assert echo.ask([echo_engine.SILENT]) == ([], "", None, "")


def test_a_client_that_leaves_harms_nobody(echo):
  """JetStream goes on with its request; the engine's slot is taken by a later one."""
  given = JETSTREAM.messages.DecodeRequest(
    max_tokens=60, token_content=JETSTREAM.messages.DecodeRequest.TokenContent(token_ids=[5] * 30)
  )
  for _ in range(3):
    call = echo.stub.Decode(given)
    next(iter(call))
    call.cancel()
  answers = echo.ask_all(*[([n] * 9,) for n in range(6)])
  assert [answer.ids for answer in answers] == [[n] * 9 for n in range(6)]


@pytest.mark.parametrize("drain_seconds, seconds", [(60, 0.01), (0, 0.5)])
def test_sigterm_lets_requests_end_as_long_as_they_may(drain_seconds, seconds):
  with running(echo_program(seconds=seconds), f"drain_seconds={drain_seconds}") as server:
    calls = [server.start([6] * 31) for _ in range(6)]
    begun = next(calls[0]).stream_content.samples[0].token_ids
    server.stub.HealthCheck(JETSTREAM.messages.HealthCheckRequest())  # behind the calls: they are all taken
    with ThreadPoolExecutor(len(calls)) as readers:
      answers = readers.map(server.finish, calls)
      assert server.stop() == 0
      answers = list(answers)
  assert "draining" in "".join(server.log) and begun == [6]
  if drain_seconds:
    assert [answer.ids for answer in answers] == [[6] * 30] + [[6] * 31] * 5
  assert all((answer.code is None) == bool(drain_seconds) for answer in answers)


@pytest.mark.parametrize("number", jetstream_server.SIGNALS)
def test_a_second_signal_ends_the_process_at_once(number):
  with running(echo_program(seconds=0.5), "drain_seconds=600") as server:
    call = server.start([6] * 31)
    next(call)
    server.process.send_signal(number)
    server.wait_for("draining", 30)
    assert server.process.poll() is None
    assert server.stop(number) == -number
    assert server.finish(call).code is grpc.StatusCode.UNAVAILABLE


def test_ctrl_c_ends_an_idle_server():
  with running(echo_program()) as server:
    assert server.stop(signal.SIGINT) == 0 and server.log[-1].startswith("draining")


def test_ctrl_c_while_the_model_is_loaded_ends_at_once():
  with starting(echo_program(loading=600)) as server:
    server.wait_for("listening")
    assert server.stop(signal.SIGINT) == EXIT_INTERRUPTED
  assert server.log[-1] == "interrupted\n"


def test_no_thread_of_jetstream_outlives_a_failure():
  """One that stays would keep the process."""

  async def serve_badly():
    server = grpc.aio.server()
    server.start = lambda: started.append(threads()) or 1 / 0
    model = Loaded(echo_engine.EchoEngine(), TOKENIZER, (echo_engine.STOP,))
    await jetstream_server.run(JETSTREAM, server, model, Settings(), 0)

  threads = lambda: [
    each for each in threading.enumerate() if isinstance(each, JETSTREAM.orchestrator.JetThread)
  ]
  started = []
  with pytest.raises(ZeroDivisionError):
    asyncio.run(serve_badly())
  assert len(started[0]) == 4 and not threads()


def test_the_assertion_that_jetstream_can_break_starts_its_thread_again():
  starts = []

  class Driver:
    def _generate_thread(self, idx):
      starts.append(idx)
      assert len(starts) == 3, "At this point we must have some requests inserted into the slots."

  type("Mended", (jetstream_service.DriverMethods, Driver), {})()._generate_thread(7)
  assert starts == [7, 7, 7]
  assert hasattr(JETSTREAM.orchestrator.Driver, "_generate_thread")


# --- the command -------------------------------------------------------------------------------------------

PROMPTS = {"def main(": 12, "import ": 3, "尼罗河 😀 = ": 20, "class A:\n  def __init__(self": 7, "x": 1}
SHAPE = ["page_size=16", "prefill_chunk=16", "scan_layers=true", "seed=3"]


def scheduled(scheduler, model, prompt, limit):
  """The ids of one answer, less the one that stops it, from the scheduler that the HTTP server has."""
  events, ids = queue.SimpleQueue(), []
  settings = Settings(max_new_tokens=limit, stop_ids=model.stop_ids)
  scheduler.submit([Job(model.tokenizer.encode(prompt), settings, events.put)])
  while not isinstance(event := events.get(timeout=60), Ended):
    ids += [token.id for token in event.tokens if token.id not in model.stop_ids]
  return ids


@pytest.fixture(scope="module")
def over_http():
  """Ids and text of each prompt's greedy answer, by the HTTP server: prompt -> (ids, text)."""
  cfg, options = load_command("kimi-k3-tiny", [*SHAPE, "slots=3", "pages=48"], ServeOptions)
  model, engine = serve.load("kimi-k3-tiny", cfg, options, 256, options.pages)
  answers = {}
  with serving(engine, model.tokenizer, model.stop_ids) as served:
    for prompt, limit in PROMPTS.items():
      ids = scheduled(served.scheduler, model, prompt, limit)
      given = dict(model="tiny", prompt=prompt, max_tokens=limit, temperature=0)
      answers[prompt] = (ids, served.client.completions.create(**given).choices[0].text)
  return answers


@pytest.mark.usefixtures("kept_programs")
def test_the_answers_are_those_of_the_http_server(over_http, programs_directory):
  """The command itself, on the weights of the package; more requests at once than slots."""
  # the same programs as in this process: found on disk, compiled no second time
  env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs_directory)}
  assert BACKEND_OPTIONS not in env["XLA_FLAGS"]
  keys = [*SHAPE, "slots=2", "max_target_length=256", "port=0"]
  with running(COMMAND, "kimi-k3-tiny", *keys, env=env) as server:
    assert server.address.startswith("127.0.0.1:")
    told = server.ask_all(*PROMPTS.items())
    given_ids = server.ask_all(*[(TOKENIZER.encode(prompt), limit) for prompt, limit in PROMPTS.items()])
    for (ids, text), answer, of_ids in zip(over_http.values(), told, given_ids, strict=True):
      assert answer == (ids, text, None, "") and of_ids == (ids, "", None, "")
    assert server.stop() == 0
  assert server.log[-1].startswith("draining")


@pytest.mark.parametrize(
  "arguments, words",
  [
    ([], "CONFIG is missing"),
    (["kimi-k3-tiny", "slts=1"], "did you mean 'slots'"),
    (["kimi-k3-tiny", "steps_per_round=2"], "steps_per_round"),
    (["kimi-k3-tiny", "port=0", "vocab_size=2000"], "serving needs a tokenizer"),
    (
      ["kimi-k3-tiny", "seed=4294967296"],
      "seed: got 4294967296, expected a whole number from 0 to 4294967295",
    ),
    (
      ["kimi-k3-tiny", "moe_dispatch=ragged_all_to_all", "moe_capacity_factor=1.0"],
      "moe_capacity_factor: an answer may not depend on its neighbours",
    ),
  ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
  assert jetstream_server.main(arguments) == 2
  told = capsys.readouterr().err.splitlines()
  assert words in told[-1]
  assert len(told) == 1 or "usage" in told[0] or "port=0" in arguments  # before it listens


@pytest.mark.parametrize("host, is_open", [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_server_that_strangers_may_ask_says_so(host, is_open, capsys):
  assert jetstream_server.main(["kimi-k3-tiny", "port=0", f"host={host}", "vocab_size=2000"]) == 2
  warning = f"WARNING: host={host}: anybody who reaches it may ask; there is no key to ask for"
  assert capsys.readouterr().err.splitlines()[1:-1] == [warning] * is_open


def test_a_port_that_is_taken_is_told(echo, capsys):
  port = echo.address.rpartition(":")[2]
  assert jetstream_server.main(["kimi-k3-tiny", f"port={port}"]) == 2
  assert f"host, port: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_help_tells_every_key(capsys):
  assert jetstream_server.main(["--help"]) == 0
  text = capsys.readouterr().out
  assert all(f"    {key}=" in text for key in JetStreamOptions.model_fields)
