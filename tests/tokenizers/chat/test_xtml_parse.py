"""Reading K3's answers: whole ones, broken ones, and every way to cut them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.tokenizers.chat.events import (
  ArgumentsDelta,
  ContentDelta,
  Finish,
  ReasoningDelta,
  ToolCallEnd,
  ToolCallStart,
  answer_of,
)
from MaxText.tokenizers.chat.formats import XtmlFormat
from MaxText.tokenizers.chat.messages import read_conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.chat.xtml_parse import MARKERS
from MaxText.tokenizers.chat.xtml_render import render
from MaxText.tokenizers.training import BYTES
from tests.tokenizers.chat.samples import TRICKY, assistants

O, C, S = "<|open|>", "<|close|>", "<|sep|>"
END = f"{C}message{S}<|end_of_msg|>"
THOUGHT = f"why{C}think{S}"
SAID = f"{O}response{S}hi{C}response{S}"


def call(body, tool="f", index=1):
  return f'{O}call tool="{tool}" index="{index}"{S}{body}{C}call{S}'


def argument(text, key="k", kind="string"):
  return f'{O}argument key="{key}" type="{kind}"{S}{text}{C}argument{S}'


def tools(*calls):
  return f"{O}tools{S}{''.join(calls)}{C}tools{S}"


def read(text, *, thinking=True, cuts=(), is_cut_off=False):
  """The answer of a text that arrives in pieces."""
  stream = XtmlFormat(None).read_text(ChatOptions(thinking=thinking))
  bounds = [0, *cuts, len(text)]
  events = [event for start, stop in zip(bounds, bounds[1:]) for event in stream.push(text[start:stop])]
  return answer_of([*events, *stream.end(is_cut_off=is_cut_off)])


def summary(answer):
  """What most tests compare: reasoning, content, and name and arguments of each call."""
  return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


NILE = call(argument("尼罗河 😀") + argument("5", "n", "number"))
RIGHT = {
  "plain": (f"{THOUGHT}{SAID}{END}", ("why", "hi", [])),
  "no reasoning": (f"{C}think{S}{SAID}{END}", ("", "hi", [])),
  "call": (f"{THOUGHT}{SAID}{tools(NILE)}{END}", ("why", "hi", [("f", '{"k": "尼罗河 😀", "n": 5}')])),
  "two calls": (
    f"{THOUGHT}{O}response{S}{C}response{S}{tools(call(''), call(argument('x'), 'g', 2))}{END}",
    ("why", "", [("f", "{}"), ("g", '{"k": "x"}')]),
  ),
  "escapes": (
    f"{THOUGHT}{SAID}{tools(call(argument('"\\\n', 'a&amp;&quot;'), 'x&amp;quot;'))}{END}",
    ("why", "hi", [("x&quot;", '{"a&\\"": "\\"\\\\\\n"}')]),
  ),
  "typed": (
    f"{THOUGHT}{SAID}{tools(call(argument('[1, {}]', 'l', 'array') + argument('null', 'z', 'null')))}{END}",
    ("why", "hi", [("f", '{"l": [1, {}], "z": null}')]),
  ),
  "raw": (
    f"{THOUGHT}{SAID}{tools(call(f'{O}json type="object"{S}{{"a": 1}}{C}json{S}'))}{END}",
    ("why", "hi", [("f", '{"a": 1}')]),
  ),
  "whole message": (f'{O}message role="assistant"{S}{O}think{S}{THOUGHT}{SAID}{END}', ("why", "hi", [])),
  "channel opened again": (f"{O}think{S}{THOUGHT}{SAID}{END}", ("why", "hi", [])),
  "angles": (f"1 < 2 <| {THOUGHT}{O}response{S}a<|b<{C}response{S}{END}", ("1 < 2 <| why", "a<|b<", [])),
}
# (text, what is made of it, a part of each problem that is said)
BROKEN = {
  "think not closed": (f"why{SAID}{END}", ("why", "hi", []), ["<|close|>think is missing"]),
  "think not closed before tools": (
    f"why{tools(NILE)}{END}",
    ("why", "", [("f", '{"k": "尼罗河 😀", "n": 5}')]),
    ["<|close|>think is missing"],
  ),
  "response not closed": (
    f"{THOUGHT}{O}response{S}hi{tools(call(''))}{END}",
    ("why", "hi", [("f", "{}")]),
    ["<|close|>response is missing"],
  ),
  "response not closed before the end": (
    f"{THOUGHT}{O}response{S}hi{END}",
    ("why", "hi", []),
    ["<|close|>response is missing"],
  ),
  "message not closed": (f"{THOUGHT}{SAID}<|end_of_msg|>", ("why", "hi", []), []),
  "end of text": (f"{THOUGHT}{SAID}[EOS]", ("why", "hi", []), []),
  "end of text at once": (
    f"{THOUGHT}{O}response{S}hi[EOS]",
    ("why", "hi", []),
    ["<|close|>response is missing"],
  ),
  "response not opened": (f"{THOUGHT}\n\nhi {END}", ("why", "hi ", []), ["outside the channels"]),
  "spaces between": (
    f"{THOUGHT}\n {SAID}\n{tools(' ', call('\n'))} {END}\n",
    ("why", "hi", [("f", "{}")]),
    [],
  ),
  "no tools around a call": (
    f"{THOUGHT}{SAID}{call(argument('x'))}{END}",
    ("why", "hi", [("f", '{"k": "x"}')]),
    ["<|open|>call outside tools", "<|close|>tools is missing"],
  ),
  "argument not closed": (
    f"{THOUGHT}{tools(f'{O}call tool="f" index="1"{S}{O}argument key="a" type="number"{S}5{C}call{S}')}{END}",
    ("why", "", [("f", '{"a": 5}')]),
    ["<|close|>argument is missing"],
  ),
  "call not closed": (
    f"{THOUGHT}{tools(f'{O}call tool="f" index="1"{S}{argument("x")}', call('', 'g', 2))}{END}",
    ("why", "", [("f", '{"k": "x"}'), ("g", "{}")]),
    ["<|close|>call is missing"],
  ),
  "call open at the end": (
    f'{THOUGHT}{O}tools{S}{O}call tool="f" index="1"{S}{argument("x")}[EOS]',
    ("why", "", [("f", '{"k": "x"}')]),
    ["<|close|>call is missing", "<|close|>tools is missing"],
  ),
  "no separator": (
    f"why{C}think{O}response{S}hi{C}response{S}{END}",
    ("why", "hi", []),
    ["<|sep|> is missing behind <|close|>think"],
  ),
  "response opened twice": (
    f"{THOUGHT}{O}response{S}a{O}response{S}b{C}response{S}{END}",
    ("why", "ab", []),
    ["<|open|>response is open already"],
  ),
  "separator alone": (f"why{S} not{C}think{S}{SAID}{END}", ("why not", "hi", []), ["<|sep|> without"]),
  "stray opening": (
    f"{THOUGHT}{O}response{S}a {O}this b{C}response{S}{END}",
    ("why", "a this b", []),
    ["<|open|> with no element behind it"],
  ),
  "stray closing": (
    f"{THOUGHT}{O}response{S}a {C}messages{C}response{S}{END}",
    ("why", "a messages", []),
    ["<|close|> with no element behind it"],
  ),
  "closes nothing": (
    f"{THOUGHT}{SAID}{C}tools{S}{END}",
    ("why", "hi", []),
    ["<|close|>tools closes nothing"],
  ),
  "unfinished name": (f"{THOUGHT}{O}resp{SAID}{END}", ("why", "hi", []), ["<|open|>resp is no element"]),
  "unfinished attribute": (
    f'{THOUGHT}{SAID}{O}tools{S}{O}call tool="f{END}',
    ("why", "hi", []),
    ['<|open|>call tool="f is no element', "<|close|>tools is missing"],
  ),
  "no JSON": (
    f"{THOUGHT}{tools(call(argument('5 apples', 'n', 'number') + argument('True', 'b', 'boolean')))}{END}",
    ("why", "", [("f", '{"n": "5 apples", "b": "True"}')]),
    ["declared number is no JSON", "declared boolean is no JSON"],
  ),
  "JSON of another type": (
    f"{THOUGHT}{tools(call(argument('[5]', 'n', 'number') + argument('NaN', 'x', 'number')))}{END}",
    ("why", "", [("f", '{"n": [5], "x": "NaN"}')]),
    ["declared number is array", "declared number is no JSON"],
  ),
  "raw but no object": (
    f"{THOUGHT}{tools(call(f'{O}json type="object"{S}{{"a": {C}json{S}'))}{END}",
    ("why", "", [("f", '{"a": ')]),
    ["the arguments of a tool call are no JSON"],
  ),
  "key twice": (
    f"{THOUGHT}{tools(call(argument('x') + argument('y') + argument('z', 'l')))}{END}",
    ("why", "", [("f", '{"k": "x", "l": "z"}')]),
    ["<|open|>argument with no new key", "text within argument"],
  ),
  "raw behind arguments": (
    f"{THOUGHT}{tools(call(argument('x') + f'{O}json type="object"{S}{{}}{C}json{S}'))}{END}",
    ("why", "", [("f", '{"k": "x"}')]),
    ["<|open|>json with no new key", "text within json"],
  ),
  "no tool": (
    f"{THOUGHT}{tools(call(argument('x'), ''))}{END}",
    ("why", "", []),
    ["a call without a tool", "text"],
  ),
  "argument outside a call": (
    f"{THOUGHT}{SAID}{argument('x')}{END}",
    ("why", "hi", []),
    ["outside call", "text"],
  ),
  "text within tools": (
    f"{THOUGHT}{tools('so: ', call('I call'))}{END}",
    ("why", "", [("f", "{}")]),
    ["text within tools", "text within call"],
  ),
  "goes on": (
    f"{THOUGHT}{SAID}{C}message{S} more {SAID}{END}",
    ("why", "hi", []),
    ["what follows the end"],
  ),
  "another message": (
    f'{THOUGHT}{SAID}{O}message role="user"{S}me{END}',
    ("why", "hi", []),
    ["another message begins", "what follows the end"],
  ),
  "thinks again": (f"{THOUGHT}{SAID}{O}think{S}!{C}think{S}{END}", ("why!", "hi", []), []),
}
CUT_OFF = {
  "in reasoning": ("why", ("why", "", []), [], "length"),
  "in a marker": (f"why{C}thi", ("why", "", []), ["stops within a marker"], "length"),
  "in a marker's spelling": ("why<|clo", ("why<|clo", "", []), [], "length"),
  "in content": (f"{THOUGHT}{O}response{S}hi", ("why", "hi", []), [], "length"),
  "in a string": (
    f'{THOUGHT}{O}tools{S}{O}call tool="f" index="1"{S}{O}argument key="cmd" type="string"{S}rm /tmp',
    ("why", "", [("f", '{"cmd": "rm /tmp')]),
    ["stops within a tool call"],
    "length",
  ),
  "between arguments": (
    f'{THOUGHT}{O}tools{S}{O}call tool="f" index="1"{S}{argument("x")}',
    ("why", "", [("f", '{"k": "x"')]),
    ["stops within a tool call"],
    "length",
  ),
  "behind the end": (f"{THOUGHT}{SAID}{END}", ("why", "hi", []), [], "stop"),
  "behind a call": (f"{THOUGHT}{tools(call(''))}{END}", ("why", "", [("f", "{}")]), [], "tool_calls"),
}


@pytest.mark.parametrize("text, want", RIGHT.values(), ids=RIGHT)
def test_a_right_answer_is_read(text, want):
  answer = read(text)
  assert summary(answer) == want
  assert answer.problems == ()
  assert answer.finish_reason == ("tool_calls" if want[2] else "stop")
  for told in answer.tool_calls:
    assert isinstance(json.loads(told.arguments), dict)


@pytest.mark.parametrize("text, want, problems", BROKEN.values(), ids=BROKEN)
def test_a_broken_answer_is_mended_and_it_is_said(text, want, problems):
  answer = read(text)
  assert summary(answer) == want
  for said, part in zip(answer.problems, problems):
    assert part in said
  assert len(answer.problems) == len(problems)
  assert not answer.incomplete


@pytest.mark.parametrize("text, want, problems, reason", CUT_OFF.values(), ids=CUT_OFF)
def test_an_answer_that_is_cut_off_keeps_what_came(text, want, problems, reason):
  answer = read(text, is_cut_off=True)
  assert summary(answer) == want
  assert len(answer.problems) == len(problems) and all(map(str.__contains__, answer.problems, problems))
  assert answer.finish_reason == reason


@pytest.mark.parametrize("end", ["", "<|end_of_msg|>", "[EOS]"])
def test_half_a_command_is_never_whole_json(end):
  text = (
    f'{THOUGHT}{O}tools{S}{call("")}{O}call tool="f" index="2"{S}{O}argument key="cmd" type="string"{S}rm /'
  )
  answer = read(text + end, is_cut_off=not end)
  assert answer.incomplete == {1}
  with pytest.raises(ValueError):
    json.loads(answer.tool_calls[1].arguments)


CORPUS = [text for text, *_ in (*RIGHT.values(), *BROKEN.values(), *CUT_OFF.values())]


@pytest.mark.parametrize("thinking, is_cut_off", [(True, False), (True, True), (False, False)])
def test_every_cut_of_the_corpus_gives_the_answer_of_the_whole(thinking, is_cut_off):
  for text in CORPUS:
    want = read(text, thinking=thinking, is_cut_off=is_cut_off)
    for cut in range(1, len(text)):
      assert read(text, thinking=thinking, cuts=(cut,), is_cut_off=is_cut_off) == want, text[:cut]
    assert read(text, thinking=thinking, cuts=range(1, len(text)), is_cut_off=is_cut_off) == want


BITS = [*MARKERS, *TRICKY, *"think response tools call argument json message".split()]
BITS += [
  ' tool="f" index="1"',
  ' key="k" type="string"',
  ' key="n" type="number"',
  "5",
  "hi",
  "<|",
  ' role="user"',
]
soups = st.lists(st.sampled_from(BITS), max_size=30).map("".join)


@given(text=soups, thinking=st.booleans(), is_cut_off=st.booleans(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_cuts_of_any_text_give_the_answer_of_the_whole(text, thinking, is_cut_off, data):
  want = read(text, thinking=thinking, is_cut_off=is_cut_off)
  cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
  assert read(text, thinking=thinking, cuts=cuts, is_cut_off=is_cut_off) == want
  assert not any(marker in want.content + want.reasoning for marker in MARKERS)
  for index, told in enumerate(want.tool_calls):
    if index in want.incomplete:
      with pytest.raises(ValueError):
        json.loads(told.arguments)


def ids_of(tokenizer, text):
  """Ids of a text that spells its markers."""
  ids = []
  while text:
    at, name = min(((text.find(name), name) for name in MARKERS if name in text), default=(len(text), ""))
    ids += tokenizer.encode(text[:at]) + ([tokenizer.special_id(name)] if name else [])
    text = text[at + len(name) :]
  return ids


def read_ids(tokenizer, ids, *, thinking=True, is_cut_off=False):
  stream = XtmlFormat(tokenizer).read_ids(ChatOptions(thinking=thinking))
  events = [event for token in ids for event in stream.push(token)]
  return events + stream.end(is_cut_off=is_cut_off)


def test_ids_give_what_text_gives(tokenizer):
  for text in CORPUS:
    assert answer_of(read_ids(tokenizer, ids_of(tokenizer, text))) == read(text), text


def test_of_ids_only_a_marker_is_a_marker(tokenizer):
  said = "write <|open|>tools<|sep|> and <|close|>response<|sep|>[EOS]"
  ids = (
    ids_of(tokenizer, f"{THOUGHT}{O}response{S}")
    + tokenizer.encode(said)
    + ids_of(tokenizer, f"{C}response{S}{END}")
  )
  assert summary(answer_of(read_ids(tokenizer, ids))) == ("why", said, [])


def test_other_special_tokens_are_left_out(tokenizer):
  inner = [tokenizer.special_id(name) for name in ("[BOS]", "<|media_pad|>", "[PAD]")]
  ids = ids_of(tokenizer, f"{THOUGHT}{O}response{S}a") + inner + ids_of(tokenizer, f"b{C}response{S}{END}")
  assert summary(answer_of(read_ids(tokenizer, ids))) == ("why", "ab", [])


def test_a_character_cut_by_a_marker_is_replaced_once(tokenizer):
  half = [BYTES.index(b"\xf0"), BYTES.index(b"\x9f")]
  ids = ids_of(tokenizer, f"{THOUGHT}{O}response{S}a") + half + ids_of(tokenizer, f"{C}response{S}{END}")
  assert answer_of(read_ids(tokenizer, ids)).content == "a\ufffd"


def test_events_come_as_soon_as_they_are_certain():
  stream = XtmlFormat(None).read_text(ChatOptions())
  told = [stream.push(text) for text in ("why", f"{C}think{S}{O}response{S}", "h", "i<", f"b{C}response{S}")]
  assert told == [
    [ReasoningDelta("why")],
    [],
    [ContentDelta("h")],
    [ContentDelta("i")],
    [ContentDelta("<b")],
  ]
  told = [stream.push(text) for text in (f'{O}tools{S}{O}call tool="f" index="1"{S}{O}argument key="k" ',)]
  assert told == [[ToolCallStart(0, "f")]]
  told = [stream.push(text) for text in (f'type="string"{S}', 'a"', f"{C}argument{S}", f"{C}call{S}")]
  assert told == [
    [ArgumentsDelta(0, '{"k": "')],
    [ArgumentsDelta(0, 'a\\"')],
    [ArgumentsDelta(0, '"')],
    [ArgumentsDelta(0, "}"), ToolCallEnd(0, True)],
  ]
  assert stream.push(f"{C}tools{S}{END}") == []
  assert stream.end(is_cut_off=False) == [Finish("tool_calls")]


def test_an_answer_without_thinking_begins_in_the_response():
  assert summary(read(f"hi{C}response{S}{END}", thinking=False)) == ("", "hi", [])


def test_long_answers_take_linear_time():
  body = "x" * 65_536
  text = f"{body}{C}think{S}{O}response{S}{body}{C}response{S}{tools(call(argument(body)))}{END}"
  answer = read(text, cuts=range(1, len(text), 7))
  assert summary(answer) == (body, body, [("f", json.dumps({"k": body}))])


def test_an_answer_is_a_message_of_openai():
  answer = read(f"{THOUGHT}{SAID}{tools(NILE)}{END}")
  assert answer.openai("call_x{}".format) == {
    "role": "assistant",
    "content": "hi",
    "reasoning_content": "why",
    "tool_calls": [
      {
        "id": "call_x0",
        "type": "function",
        "function": {"name": "f", "arguments": '{"k": "尼罗河 😀", "n": 5}'},
      }
    ],
  }
  assert read(f"{C}think{S}{END}").openai() == {"role": "assistant", "content": ""}


def generated(tokenizer, message, thinking):
  """The tokens that a model generates for an OpenAI message."""
  rendered = render(
    read_conversation([message]), tokenizer, ChatOptions(thinking=thinking, generation_prompt=False)
  )
  return [token for token, is_output in zip(rendered.ids, rendered.is_output) if is_output]


@given(message=assistants(), thinking=st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_is_read_is_what_was_said_and_is_said_again_alike(tokenizer, message, thinking):
  ids = generated(tokenizer, message, thinking)
  answer = answer_of(read_ids(tokenizer, ids, thinking=thinking))
  stored = [call["function"] for call in message.get("tool_calls", [])]
  assert answer.content == message["content"]
  assert answer.reasoning == (message.get("reasoning_content", "") if thinking else "")
  assert [call.name for call in answer.tool_calls] == [call["name"] for call in stored]
  for told, want in zip(answer.tool_calls, stored):
    assert told.arguments == want["arguments"] or json.loads(told.arguments) == json.loads(want["arguments"])
  again = answer.openai("c{}".format) | ({"content": ""} if not answer.content else {})
  assert generated(tokenizer, again, thinking) == ids
