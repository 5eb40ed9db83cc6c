"""Kimi-Linear's format: the form that Kimi K2 publishes, and reading it in every cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.tokenizers.chat.events import (
  ArgumentsDelta,
  ContentDelta,
  Finish,
  ToolCallEnd,
  ToolCallStart,
  answer_of,
)
from MaxText.tokenizers.chat.formats import KimiK2Format
from MaxText.tokenizers.chat.kimi_k2_parse import MARKERS
from MaxText.tokenizers.chat.kimi_k2_render import render, segments
from MaxText.tokenizers.chat.messages import MessageError, read_conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.chat.segments import text_of
from tests.tokenizers.chat.samples import CLOCK, TRICKY, WEATHER, assistants, conversations

BEGIN, STOP, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|im_end|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"


def call(arguments, call_id="functions.f:0", end="<|tool_call_end|>"):
  return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}{end}"


def written(messages, tools=None, **options):
  return text_of(segments(read_conversation(messages, tools), ChatOptions(**options)))


def asked(name, call_id, arguments="{}"):
  return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_conversation_is_what_kimi_k2_publishes():
  messages = [
    {"role": "system", "content": "You are Kimi."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "So:", "tool_calls": [asked("f", "functions.f:0", '{"city": "X"}')]},
    {"role": "tool", "tool_call_id": "functions.f:0", "name": "f", "content": "sun"},
    {"role": "assistant", "content": [{"type": "text", "text": "Su"}, {"type": "text", "text": "nny"}]},
    {"role": "user", "content": "thanks", "name": "ann"},
  ]
  assert written(messages, [CLOCK]) == (
    '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"clock"}}]<|im_end|>'
    "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|><|im_user|>user<|im_middle|>Weather?<|im_end|>"
    f"{ASSISTANT}So:{BEGIN}{call('{"city": "X"}')}{STOP}<|im_end|>"
    "<|im_system|>f<|im_middle|>## Return of functions.f:0\nsun<|im_end|>"
    f"{ASSISTANT}Sunny<|im_end|><|im_user|>ann<|im_middle|>thanks<|im_end|>{ASSISTANT}"
  )
  assert written(messages, [CLOCK], tool_choice="none") == written(messages)
  assert written(messages, generation_prompt=False) + ASSISTANT == written(messages)


def test_ids_of_another_form_are_replaced_in_calls_and_results():
  asking = {
    "role": "assistant",
    "content": None,
    "tool_calls": [asked("f", "call_x"), asked("g", "call_y", "")],
  }
  results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("call_y", "call_x")]
  said = written(
    [asking, *results, {**asking, "tool_calls": [asked("g", "functions.f:0"), asked("h", "functions.h:9")]}]
  )
  assert f"{BEGIN}{call('{}')}{call('{}', 'functions.g:1')}{STOP}" in said
  assert (
    "## Return of functions.g:1\ncall_y<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.f:0\n"
    in said
  )
  assert f"{BEGIN}{call('{}', 'functions.g:2')}{call('{}', 'functions.h:9')}{STOP}" in said


REFUSED = [
  (
    [{"role": "assistant", "content": "x", "reasoning_content": "why"}],
    {},
    r"messages\[0\].reasoning_content",
  ),
  ([{"role": "system", "content": "", "tools": [CLOCK]}], {}, r"messages\[0\].tools"),
  (
    [{"role": "user", "content": "x"}],
    {"tool_choice": "required"},
    "tool_choice: 'required' cannot be expressed",
  ),
  ([{"role": "user", "content": "x"}], {"response_format": {"type": "json_object"}}, "response_format.type"),
]


@pytest.mark.parametrize("messages, options, fault", REFUSED, ids=[fault for *_, fault in REFUSED])
def test_what_the_format_cannot_express_is_refused(messages, options, fault):
  with pytest.raises(MessageError, match=fault):
    written(messages, **options)


def read(text, *, cuts=(), is_cut_off=False):
  stream = KimiK2Format(None).read_text(ChatOptions())
  bounds = [0, *cuts, len(text)]
  events = [event for start, stop in zip(bounds, bounds[1:]) for event in stream.push(text[start:stop])]
  return answer_of([*events, *stream.end(is_cut_off=is_cut_off)])


def summary(answer):
  return answer.content, [(call.name, call.arguments, call.id) for call in answer.tool_calls]


ONE = [("f", '{"a": 1}', "functions.f:0")]
ANSWERS = {
  "text": (f"hi{END}", ("hi", []), []),
  "call": (f"hi{BEGIN}{call('{"a": 1}')}{STOP}{END}", ("hi", ONE), []),
  "spaces": (f"hi{BEGIN} {call(' {"a": 1}', ' functions.f:0 ')}\n{STOP}{END}\n", ("hi", ONE), []),
  "two calls": (
    f"{BEGIN}{call('{"a": 1}')}{call('{}', 'functions.my.tool:1')}{STOP}{END}",
    ("", [*ONE, ("my.tool", "{}", "functions.my.tool:1")]),
    [],
  ),
  "text behind": (f"a{BEGIN}{call('{"a": 1}')}{STOP}b{END}", ("ab", ONE), []),
  "no prefix": (f"{BEGIN}{call('{}', 'f')}{STOP}{END}", ("", [("f", "{}", "f")]), []),
  "colon in a name": (
    f"{BEGIN}{call('{}', 'functions.a:b')}{STOP}{END}",
    ("", [("a:b", "{}", "functions.a:b")]),
    [],
  ),
  "empty arguments": (f"{BEGIN}{call('')}{STOP}{END}", ("", [("f", "{}", "functions.f:0")]), []),
  "no arguments": (
    f"{BEGIN}<|tool_call_begin|>functions.f:0<|tool_call_end|>{STOP}{END}",
    ("", [("f", "{}", "functions.f:0")]),
    [],
  ),
  "end of text": (f"hi{BEGIN}{call('{"a": 1}')}{STOP}[EOS]", ("hi", ONE), []),
  "section not closed": (f"hi{BEGIN}{call('{"a": 1}')}{END}", ("hi", ONE), []),
  "section not opened": (f"hi{call('{"a": 1}')}{STOP}{END}", ("hi", ONE), ["outside a section"]),
  "call not closed": (
    f"{BEGIN}{call('{"a": 1}', end='')}{STOP}{END}",
    ("", ONE),
    ["<|tool_call_end|> is missing"],
  ),
  "nothing closed": (f"{BEGIN}{call('{"a": 1}', end='')}{END}", ("", ONE), ["stops within a tool call"]),
  "no JSON": (
    f"{BEGIN}{call('{"a": ')}{STOP}{END}",
    ("", [("f", '{"a": ', "functions.f:0")]),
    ["the arguments of a tool call are no JSON"],
  ),
  "no name": (
    f"{BEGIN}{call('{}', 'functions.:0')}{STOP}{END}",
    ("", []),
    ["a call without", "text between"],
  ),
  "text between": (f"{BEGIN}I call{call('{"a": 1}')}{STOP}{END}", ("", ONE), ["text between calls"]),
  "foreign marker": (f"a<|im_user|>b{END}", ("ab", []), ["<|im_user|> is dropped"]),
  "goes on": (f"a{END}b<|im_user|>", ("a", []), ["what follows the end"]),
}
CUT_OFF = {
  "in text": ("hi", ("hi", []), "length"),
  "in an id": (f"hi{BEGIN}<|tool_call_begin|>functi", ("hi", []), "length"),
  "in arguments": (
    f"{BEGIN}{call('{"a": "rm /', end='')}",
    ("", [("f", '{"a": "rm /', "functions.f:0")]),
    "length",
  ),
  "behind the end": (f"{BEGIN}{call('{"a": 1}')}{STOP}{END}", ("", ONE), "tool_calls"),
}


@pytest.mark.parametrize("text, want, problems", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_read_and_what_is_broken_is_said(text, want, problems):
  answer = read(text)
  assert summary(answer) == want
  assert len(answer.problems) == len(problems) and all(map(str.__contains__, answer.problems, problems))
  assert answer.finish_reason == ("tool_calls" if want[1] else "stop")
  assert not answer.incomplete


@pytest.mark.parametrize("text, want, reason", CUT_OFF.values(), ids=CUT_OFF)
def test_an_answer_that_is_cut_off_keeps_what_came(text, want, reason):
  answer = read(text, is_cut_off=True)
  assert (summary(answer), answer.finish_reason) == (want, reason)


def test_every_cut_of_the_answers_gives_the_answer_of_the_whole():
  for text in [text for text, *_ in (*ANSWERS.values(), *CUT_OFF.values())]:
    for is_cut_off in (False, True):
      want = read(text, is_cut_off=is_cut_off)
      assert read(text, cuts=range(1, len(text)), is_cut_off=is_cut_off) == want
      for cut in range(1, len(text)):
        assert read(text, cuts=(cut,), is_cut_off=is_cut_off) == want


soups = st.lists(st.sampled_from([*MARKERS, *TRICKY, "functions.f:0", "{}", '{"a": 1}']), max_size=30).map(
  "".join
)


@given(text=soups, is_cut_off=st.booleans(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_cuts_of_any_text_give_the_answer_of_the_whole(text, is_cut_off, data):
  want = read(text, is_cut_off=is_cut_off)
  cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
  assert read(text, cuts=cuts, is_cut_off=is_cut_off) == want
  assert not any(marker in want.content for marker in MARKERS)
  for index in want.incomplete:
    with pytest.raises(ValueError):
      json.loads(want.tool_calls[index].arguments)


def test_events_come_as_soon_as_they_are_certain(linear_tokenizer):
  stream = KimiK2Format(linear_tokenizer).read_ids(ChatOptions())
  special = linear_tokenizer.special_id
  assert [stream.push(token) for token in linear_tokenizer.encode("hi")] == [
    [ContentDelta("h")],
    [ContentDelta("i")],
  ]
  head = [special(BEGIN), special("<|tool_call_begin|>"), *linear_tokenizer.encode("functions.f:0")]
  assert not any(stream.push(token) for token in head)
  assert stream.push(special("<|tool_call_argument_begin|>")) == [ToolCallStart(0, "f", "functions.f:0")]
  told = [stream.push(token) for token in linear_tokenizer.encode("{}")]
  assert told == [[ArgumentsDelta(0, "{")], [ArgumentsDelta(0, "}")]]
  assert stream.push(special("<|tool_call_end|>")) == [ToolCallEnd(0, True)]
  assert [stream.push(special(name)) for name in (STOP, END)] == [[], []]
  assert stream.end(is_cut_off=False) == [Finish("tool_calls")]


def generated(tokenizer, message):
  rendered = render(read_conversation([message]), tokenizer, ChatOptions(generation_prompt=False))
  return [token for token, is_output in zip(rendered.ids, rendered.is_output) if is_output]


@given(message=assistants(reasoning=False))
@settings(max_examples=80, deadline=None)
def test_what_is_read_is_what_was_said_and_is_said_again_alike(linear_tokenizer, message):
  ids = generated(linear_tokenizer, message)
  stream = KimiK2Format(linear_tokenizer).read_ids(ChatOptions())
  events = [event for token in ids for event in stream.push(token)]
  answer = answer_of(events + stream.end(is_cut_off=False))
  assert answer.content == message["content"]
  stored = [call["function"] for call in message.get("tool_calls", [])]
  assert [(call.name, call.arguments) for call in answer.tool_calls] == [
    (call["name"], call["arguments"]) for call in stored
  ]
  assert generated(linear_tokenizer, answer.openai() | {"content": answer.content}) == ids


@given(messages=conversations(reasoning=False))
@settings(max_examples=60, deadline=None)
def test_the_ids_are_the_text_and_prompts_are_what_training_sees(linear_tokenizer, messages):
  taught = ChatOptions(generation_prompt=False)
  conversation = read_conversation(messages, [WEATHER])
  whole, walked = render(conversation, linear_tokenizer, taught), list(segments(conversation, taught))
  assert linear_tokenizer.decode(whole.ids) == text_of(walked)
  assert sum(token >= 256 for token in whole.ids) == sum(segment.is_marker for segment in walked)
  if messages[-1]["role"] == "assistant" and len(messages) > 1:
    prompt = render(read_conversation(messages[:-1], [WEATHER]), linear_tokenizer).ids
    assert whole.ids[: len(prompt)] == prompt
    assert not whole.is_output[len(prompt) - 1] and all(whole.is_output[len(prompt) :])
