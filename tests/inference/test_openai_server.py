"""The server through OpenAI's client: answers, errors, limits; the engine says what a test wants."""

import json
import threading
import time

import pytest

from MaxText.tokenizers.chat import messages, xtml_render
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference.scripted_engine import ScriptedEngine
from tests.inference.served import httpx, openai, serving, wait_until
from tests.locations import TINY
from tests.tokenizers.chat.samples import CLOCK, WEATHER

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = "尼罗河 😀 naïve, done"


@pytest.fixture(scope="module")
def tokenizer():
  return KimiTokenizer.from_directory(TINY)


@pytest.fixture(scope="module")
def server(tokenizer):
  with serving(ScriptedEngine(), tokenizer, sorted(tokenizer.stop_ids), queue_limit=3) as served:
    yield served


@pytest.fixture(autouse=True)
def quick(request):
  """Every test begins with an engine that does nothing special."""
  yield
  if "server" in request.fixturenames:
    engine = request.getfixturevalue("server").engine
    engine.seconds, engine.gate = 0.0, None
    wait_until(lambda: engine.resources.used_slots == 0)


def chat_answer(tokenizer, message, *, thinking=True):
  """Ids that K3 generates for a message."""
  conversation = messages.read_conversation([*HELLO, {"role": "assistant", **message}])
  whole = xtml_render.render(conversation, tokenizer, ChatOptions(thinking=thinking, generation_prompt=False))
  return [token for token, is_output in zip(whole.ids, whole.is_output) if is_output]


def text_answer(tokenizer, text):
  return [*tokenizer.encode(text), tokenizer.special_id("[EOS]")]


def joined(chunks):
  """Text, finish reason and chunks of a streamed completion."""
  chunks = list(chunks)
  choices = [choice for chunk in chunks for choice in chunk.choices]
  reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
  return "".join(choice.text for choice in choices), reasons, chunks


def chat_joined(chunks):
  """What the deltas of one streamed chat add up to."""
  message, reasons = {"content": "", "reasoning_content": "", "calls": {}}, []
  for chunk in chunks:
    for choice in chunk.choices:
      delta = choice.delta
      message["content"] += delta.content or ""
      message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
      for call in delta.tool_calls or ():
        known = message["calls"].setdefault(
          call.index, {"id": call.id, "name": call.function.name, "args": ""}
        )
        known["args"] += call.function.arguments or ""
      reasons += [choice.finish_reason] if choice.finish_reason else []
  return message, reasons


# --- answers -----------------------------------------------------------------------------------------------


def test_a_completion_is_the_same_whole_and_streamed(server, tokenizer):
  server.engine.answers = [text_answer(tokenizer, TEXT)]
  given = dict(model="tiny", prompt="x", max_tokens=100, temperature=0)
  whole = server.client.completions.create(**given)
  assert (whole.choices[0].text, whole.choices[0].finish_reason) == (TEXT, "stop")
  assert whole.usage.prompt_tokens == len(tokenizer.encode("x"))
  assert whole.usage.completion_tokens == len(tokenizer.encode(TEXT)) + 1
  text, reasons, chunks = joined(
    server.client.completions.create(**given, stream=True, stream_options={"include_usage": True})
  )
  assert (text, reasons) == (TEXT, ["stop"])
  assert len(chunks) > 10 and chunks[-1].usage == whole.usage and not chunks[-1].choices


def test_no_part_of_a_stream_has_half_a_character(server, tokenizer):
  server.engine.answers = [chat_answer(tokenizer, {"reasoning_content": "想 🤔", "content": TEXT})]
  stream = list(server.client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
  message, reasons = chat_joined(stream)
  assert (message["content"], message["reasoning_content"], reasons) == (TEXT, "想 🤔", ["stop"])
  assert "\ufffd" not in "".join(chunk.model_dump_json() for chunk in stream)


def test_a_chat_is_the_same_whole_and_streamed(server, tokenizer):
  answer = {
    "reasoning_content": "I should ask.",
    "content": "One moment.",
    "tool_calls": [
      {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "尼罗"}'}},
      {"type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ],
  }
  server.engine.answers = [chat_answer(tokenizer, answer)]
  given = dict(model="tiny", messages=HELLO, tools=[WEATHER, CLOCK])
  whole = server.client.chat.completions.create(**given).choices[0]
  calls = whole.message.tool_calls
  assert whole.finish_reason == "tool_calls" and whole.message.content == "One moment."
  assert whole.message.reasoning_content == "I should ask."
  assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
    ("get_weather", {"city": "尼罗"}),
    ("clock", {}),
  ]
  assert len({call.id for call in calls}) == 2
  message, reasons = chat_joined(server.client.chat.completions.create(**given, stream=True))
  assert reasons == ["tool_calls"] and message["content"] == "One moment."
  streamed = [(call["name"], call["args"]) for _, call in sorted(message["calls"].items())]
  assert streamed == [(c.function.name, c.function.arguments) for c in calls]
  assert all(call["id"] for call in message["calls"].values())


def test_a_tool_gets_64_kilobytes_of_arguments(tokenizer):
  arguments = json.dumps({"city": "z" * 65536})
  call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
  script = chat_answer(tokenizer, {"content": "", "tool_calls": [call]})
  engine = ScriptedEngine(pages=8, page_size=16384, max_target_length=131072, steps=64)
  engine.answers = [script]
  with serving(engine, tokenizer, sorted(tokenizer.stop_ids)) as served:
    given = dict(model="tiny", messages=HELLO, tools=[WEATHER])
    whole = served.client.chat.completions.create(**given).choices[0]
  assert json.loads(whole.message.tool_calls[0].function.arguments) == json.loads(arguments)
  assert whole.finish_reason == "tool_calls"


def test_an_answer_without_thinking_is_all_content(server, tokenizer):
  server.engine.answers = [chat_answer(tokenizer, {"content": "Hi"}, thinking=False)]
  for extra in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"thinking": False}}}):
    answer = server.client.chat.completions.create(model="tiny", messages=HELLO, **extra)
    assert answer.choices[0].message.content == "Hi"
    assert not hasattr(answer.choices[0].message, "reasoning_content")


def test_the_limit_of_tokens_is_exact_under_both_names(server, tokenizer):
  server.engine.answers = [chat_answer(tokenizer, {"reasoning_content": "a b c d e f", "content": "g"})]
  for name in ("max_tokens", "max_completion_tokens"):
    answer = server.client.chat.completions.create(model="tiny", messages=HELLO, **{name: 3})
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stop", ["罗河 😀", ["zzz", "ve, d", "😀 naïve, don"], ", "])
def test_a_stop_string_ends_an_answer_across_the_borders_of_tokens(server, tokenizer, stop):
  stops = [stop] if isinstance(stop, str) else stop
  ends = {s: TEXT.find(s) + len(s) for s in stops if s in TEXT}
  want = TEXT[: TEXT.find(min(ends, key=ends.get))]
  server.engine.answers = [text_answer(tokenizer, TEXT)]
  given = dict(model="tiny", prompt="x", max_tokens=100, stop=stop)
  whole = server.client.completions.create(**given)
  assert (whole.choices[0].text, whole.choices[0].finish_reason) == (want, "stop")
  assert whole.usage.completion_tokens < len(tokenizer.encode(TEXT))
  assert joined(server.client.completions.create(**given, stream=True))[:2] == (want, ["stop"])
  server.engine.answers = [chat_answer(tokenizer, {"reasoning_content": TEXT, "content": TEXT})]
  chat = server.client.chat.completions.create(model="tiny", messages=HELLO, stop=stop)
  assert chat.choices[0].message.content == want and chat.choices[0].message.reasoning_content == TEXT
  assert chat.choices[0].finish_reason == "stop"


def test_what_only_begins_like_a_stop_string_comes_through(server, tokenizer):
  server.engine.answers = [text_answer(tokenizer, "ab don")]
  assert server.client.completions.create(model="tiny", prompt="x", stop="done").choices[0].text == "ab don"


def test_a_stop_id_that_is_text_is_no_part_of_an_answer(server, tokenizer):
  ids = tokenizer.encode("abc def")
  extra = {"stop_token_ids": [ids[-1]]}
  want = tokenizer.decode(ids[:-1])
  server.engine.answers = [text_answer(tokenizer, "abc def")]
  answer = server.client.completions.create(model="tiny", prompt="x", extra_body=extra)
  assert (answer.choices[0].text, answer.choices[0].finish_reason) == (want, "stop")
  server.engine.answers = [chat_answer(tokenizer, {"content": "abc def"}, thinking=False)]
  given = dict(model="tiny", messages=HELLO, reasoning_effort="none")
  choice = server.client.chat.completions.create(**given, extra_body=extra).choices[0]
  assert (choice.message.content, choice.finish_reason) == (want, "stop")


def test_more_answers_than_may_wait_are_a_mistake(server):
  create = server.client.completions.create
  refused(create, openai.BadRequestError, "4 answers at once", model="tiny", prompt="x", n=4)


def test_several_choices_of_several_prompts_keep_their_order(server, tokenizer):
  texts = ["zero", "one", "two", "three"]
  given = dict(model="tiny", messages=HELLO, n=2, reasoning_effort="none")
  server.engine.answers = [chat_answer(tokenizer, {"content": text}, thinking=False) for text in texts[:2]]
  answer = server.client.chat.completions.create(**given)
  assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "zero"), (1, "one")]
  server.engine.answers = [text_answer(tokenizer, text) for text in texts[:3]]
  answer = server.client.completions.create(model="tiny", prompt=["a", "bc", "d"])
  assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts[:3]))
  assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in ("a", "bc", "d"))


def test_log_probabilities_stand_beside_their_tokens(server, tokenizer):
  server.engine.answers = [text_answer(tokenizer, "ab c")]
  given = dict(model="tiny", prompt="x", logprobs=2)
  told = server.client.completions.create(**given).choices[0].logprobs
  assert "".join(told.tokens[:-1]) == "ab c" and set(told.token_logprobs) == {-0.5}
  assert told.text_offset[1] == len(told.tokens[0]) and len(told.top_logprobs[0]) == 2
  *_, chunks = joined(server.client.completions.create(**given, stream=True))
  streamed = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
  assert sum((part.text_offset for part in streamed), []) == told.text_offset
  server.engine.answers = [chat_answer(tokenizer, {"content": "é"}, thinking=False)]
  chat = server.client.chat.completions.create(
    model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, reasoning_effort="none"
  )
  first = chat.choices[0].logprobs.content[0]
  assert first.bytes == list("é".encode())[: len(first.bytes)] and len(first.top_logprobs) == 3


def test_ids_are_what_a_chat_is_rendered_to(server, tokenizer):
  http = httpx.Client(base_url=server.url)
  told = http.post("/tokenize", json={"model": "tiny", "prompt": TEXT}).json()
  assert told["tokens"] == tokenizer.encode(TEXT) and told["count"] == len(told["tokens"])
  assert told["max_model_len"] == 1024
  assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": TEXT}
  marked = http.post("/tokenize", json={"messages": [{"role": "user", "content": "<|end_of_msg|>"}]}).json()
  plain = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
  end = tokenizer.special_id("<|end_of_msg|>")
  assert marked["tokens"].count(end) == plain["tokens"].count(end)  # no text becomes markup


def test_the_list_of_models_says_what_they_can_do(server):
  [model] = server.client.models.list().data
  assert model.id == "tiny" == server.client.models.retrieve("tiny").id
  assert model.capabilities == {"chat": True, "reasoning": True, "tool_calls": True, "images": False}


# --- refusals ----------------------------------------------------------------------------------------------


def refused(call, kind, *words, **given):
  with pytest.raises(kind) as refusal:
    call(**given)
  assert set(refusal.value.body) == {"message", "type", "param", "code"}
  for word in words:
    assert word in refusal.value.body["message"]
  return refusal.value


@pytest.mark.parametrize(
  "field, value, words",
  [
    ("temperature", -1, ["temperature: got -1"]),
    ("top_p", 0, ["top_p: got 0"]),
    ("n", 17, ["n: got 17"]),
    ("max_tokens", 0, ["max_tokens: got 0"]),
    ("stop", [""], ["stop[0]: got ''"]),
    ("logprobs", 21, ["logprobs: got 21"]),
    ("echo", True, ["echo: not supported"]),
    ("seed", 2**32, ["seed: got 4294967296"]),
    ("prompt", "", ["prompt: empty prompt"]),
    ("prompt", [5, 5000], ["token id 5000", "outside the vocabulary"]),
    ("prompt", {"a": 1}, ["prompt: got {'a': 1}"]),
    ("max_tokns", 5, ["max_tokns: unknown field, did you mean 'max_tokens'?"]),
    ("logit_bias", {"5": 1}, ["logit_bias: unknown field"]),
  ],
)
def test_a_field_that_cannot_be_served_is_named(server, field, value, words):
  body = {"model": "tiny", "prompt": "x", field: value}
  reply = httpx.post(f"{server.url}/v1/completions", json=body)
  assert reply.status_code == 400
  error = reply.json()["error"]
  assert error["type"] == "invalid_request_error"
  assert all(word in error["message"] for word in words), error


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(server):
  create = server.client.completions.create
  error = refused(
    create, openai.BadRequestError, "1024 tokens", "holds 1024", model="tiny", prompt=[5] * 1024
  )
  assert error.code == "context_length_exceeded" and error.param == "prompt"
  server.engine.answers = [[5] * 9]
  answer = create(model="tiny", prompt=[5] * 1023, max_tokens=9)
  assert answer.usage.completion_tokens == 1 and answer.choices[0].finish_reason == "length"


def test_images_are_refused(server):
  part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
  given = dict(model="tiny", messages=[{"role": "user", "content": [part]}])
  error = refused(server.client.chat.completions.create, openai.BadRequestError, "no images", **given)
  assert error.param == "messages[0].content[0]"


def test_another_model_or_path_is_not_found(server):
  create = server.client.completions.create
  error = refused(create, openai.NotFoundError, "'gpt-9' is not served", model="gpt-9", prompt="x")
  assert error.code == "model_not_found"
  refused(server.client.models.retrieve, openai.NotFoundError, "'gpt-9'", model="gpt-9")
  for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
    reply = httpx.request(method, server.url + path)
    assert reply.status_code == status and "message" in reply.json()["error"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"model": NaN}', b"[" * 60000, b"{}"])
def test_a_bad_body_is_refused_and_harms_nobody(server, body):
  reply = httpx.post(f"{server.url}/v1/chat/completions", content=body)
  assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_is_no_defect(server, tokenizer):
  server.engine.answers = [text_answer(tokenizer, "a")]
  post = lambda path, body: httpx.post(server.url + path, content=json.dumps(body).encode())
  chat = {"model": "tiny", "messages": [{"role": "user", "content": "\ud800 x"}]}
  assert post("/v1/chat/completions", chat).status_code == 200
  changes = [
    ({"prompt": "\ud800"}, 200),
    ({"model": "\ud800"}, 404),
    ({"stop": "\ud800"}, 400),
    ({"\ud800": 1}, 400),
  ]
  for change, status in changes:
    reply = post("/v1/completions", {"model": "tiny", "prompt": "x", **change})
    assert reply.status_code == status and ("error" in reply.json()) == (status != 200)


def test_a_large_body_is_refused(server):
  body = {"model": "tiny", "prompt": "x" * 70000}
  reply = httpx.post(f"{server.url}/v1/completions", json=body)
  assert reply.status_code == 413 and "65536 bytes" in reply.json()["error"]["message"]


def test_the_key_is_asked_for(tokenizer):
  with serving(ScriptedEngine(), tokenizer, [769], api_key="schlüssel") as served:
    for key in ("wrong", "schlüssel2", "sch"):
      headers = {"Authorization": f"Bearer {key}".encode()}
      reply = httpx.get(f"{served.url}/v1/models", headers=headers)
      assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{served.url}/v1/models").status_code == 401
    headers = {"Authorization": "Bearer schlüssel".encode()}
    assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/"):
      assert httpx.get(served.url + path).status_code == 200


# --- load, clients that leave, ends ------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_while_others_go_on(server, tokenizer):
  text = "a b c " * 10
  server.engine.answers, server.engine.seconds = [text_answer(tokenizer, text)], 0.05
  given, results = dict(model="tiny", prompt="x", max_tokens=100), []
  ask = lambda: results.append(server.client.completions.create(**given).choices[0].text)
  threads = [threading.Thread(target=ask) for _ in range(5)]  # two slots, three places in the queue
  for thread in threads[:2]:
    thread.start()
  wait_until(lambda: server.engine.active.sum() == 2)
  server.engine.gate = gate = threading.Event()
  for thread in threads[2:]:
    thread.start()
  wait_until(lambda: server.scheduler.now().waiting == 3)
  started = time.monotonic()
  error = refused(
    server.client.completions.create, openai.RateLimitError, "3 requests wait", model="tiny", prompt="x"
  )
  assert time.monotonic() - started < 0.5 and int(error.response.headers["retry-after"]) >= 1
  server.engine.gate, server.engine.seconds = None, 0.0
  gate.set()
  for thread in threads:
    thread.join(10)
  assert results == [text] * 5


@pytest.mark.parametrize("route", ["chat", "completions", "whole"])
def test_who_stops_to_listen_frees_the_slot_within_two_steps(server, tokenizer, route):
  server.engine.answers, server.engine.seconds = [[40] * 200], 0.1
  given = dict(model="tiny", max_tokens=200, stream=route != "whole")
  if route == "chat":
    stream = server.client.chat.completions.create(messages=HELLO, **given)
  elif route == "completions":
    stream = server.client.completions.create(prompt="x", **given)
  else:
    with pytest.raises(httpx.ReadTimeout):
      httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **given}, timeout=0.5)
    count = server.engine.picked
  if route != "whole":
    for _ in range(4):
      next(iter(stream))
    stream.close()
    count = server.engine.picked
  wait_until(lambda: server.engine.resources.used_slots == 0, seconds=1)
  assert server.engine.picked - count <= 2


def test_the_deadline_ends_an_answer(tokenizer):
  engine = ScriptedEngine()
  engine.answers, engine.seconds = [[40] * 200], 0.05
  with serving(engine, tokenizer, [769], seconds=0.3) as served:
    given = dict(model="tiny", prompt="x", max_tokens=200)
    error = refused(served.client.completions.create, openai.APIStatusError, "longer than", **given)
    assert error.status_code == 408
    with pytest.raises(openai.APIError, match="longer than"):
      list(served.client.completions.create(**given, stream=True))


def test_an_answer_that_is_not_finite_is_an_error_of_that_request_alone(server, tokenizer):
  engine = server.engine
  engine.answers, engine.seconds = [[40] * 60, text_answer(tokenizer, "x" * 30)], 0.01
  stream = server.client.completions.create(model="tiny", prompt="x", max_tokens=60, stream=True)
  next(iter(stream))
  [slot] = [slot for slot in range(2) if engine.active[slot]]
  healthy = []
  ask = lambda: healthy.append(server.client.completions.create(model="tiny", prompt="x", max_tokens=60))
  thread = threading.Thread(target=ask)
  thread.start()
  wait_until(lambda: engine.active.sum() == 2)
  engine.broken.add(slot)
  with pytest.raises(openai.APIError, match="NaN"):
    list(stream)
  thread.join(10)
  assert healthy[0].choices[0].text == "x" * 30
  assert b"maxtext_not_finite_total 1.0" in server.metrics.exposition()


def test_draining_refuses_new_requests_and_lets_the_others_end(tokenizer):
  engine = ScriptedEngine()
  engine.answers, engine.seconds = [text_answer(tokenizer, "a" * 40)], 0.02
  with serving(engine, tokenizer, [769]) as served:
    assert httpx.get(f"{served.url}/ready").json() == {"status": "ready"}
    stream = served.client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True)
    next(iter(stream))
    served.scheduler.refuse()
    reply = httpx.get(f"{served.url}/ready")
    assert (reply.status_code, reply.json()) == (503, {"status": "draining"})
    assert httpx.get(f"{served.url}/health").status_code == 200
    error = refused(
      served.client.completions.create,
      openai.InternalServerError,
      "shutting down",
      model="tiny",
      prompt="x",
    )
    assert error.status_code == 503 and int(error.response.headers["retry-after"]) >= 1
    assert joined(stream)[1] == ["stop"]


def test_the_page_needs_nothing_from_elsewhere(server):
  page = httpx.get(f"{server.url}/")
  assert page.headers["content-type"].startswith("text/html")
  assert "http://" not in page.text and "https://" not in page.text
