"""K3's chat format: the published token ids, the published segments, and laws of every rendering."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.common.errors import InputError
from MaxText.tokenizers.chat.messages import MessageError, read_conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.chat.segments import text_of
from MaxText.tokenizers.chat.xtml_render import MARKERS, render, segments
from tests.tokenizers.chat.samples import CALLS, CLOCK, MESSAGES, WEATHER, conversations

QUIET = ChatOptions(thinking=False)
# fmt: off
OPEN, CLOSE, SEP, END = 163587, 163588, 163589, 163586
# ids of the released vocabulary, for exactly the pieces in which the published encoder cuts the text
RELEASED = {
  "message": [2778], " role": [6244], " type": [1798], '="': [878], '"': [1],
  "system": [14062], "user": [2482],
  "assistant": [69702], "thinking-effort": [130400, 59991, 470], "think": [39964], "response": [12092],
  "You are helpful.": [3900, 554, 13205, 13], "Hello": [19180],
  "`thinking_effort` guides on how much to think in your thinking channel "
  "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
  "Now the system is invoked with `thinking_effort=max`.": [
    63, 130400, 123074, 470, 63, 28560, 418, 1632, 2455, 308, 2704, 306, 651, 9545, 8491, 347, 2976,
    3411, 276, 4503, 8491, 904, 9141, 4661, 3867, 1268, 1332, 5713, 1268, 50004, 5713, 1268, 19421,
    5713, 316, 1268, 5354, 16518, 10048, 276, 2403, 387, 42070, 472, 1268, 130400, 123074, 470,
    105281, 11369,
  ],
}
SAID = [
  OPEN, 2778, 6244, 878, 14062, 1, SEP, 3900, 554, 13205, 13, CLOSE, 2778, SEP, END,
  OPEN, 2778, 6244, 878, 2482, 1, SEP, 19180, CLOSE, 2778, SEP, END,
  OPEN, 2778, 6244, 878, 69702, 1, SEP,
]
EFFORT = [
  OPEN, 2778, 6244, 878, 14062, 1, 1798, 878, 130400, 59991, 470, 1, SEP,
  63, 130400, 123074, 470, 63, 28560, 418, 1632, 2455, 308, 2704, 306, 651, 9545, 8491, 347, 2976, 3411, 276,
  4503, 8491, 904, 9141, 4661, 3867, 1268, 1332, 5713, 1268, 50004, 5713, 1268, 19421, 5713, 316, 1268, 5354,
  16518, 10048, 276, 2403, 387, 42070, 472, 1268, 130400, 123074, 470, 105281, 11369,
  CLOSE, 2778, SEP, END,
]
# fmt: on


class ReleasedPieces:
  """Knows the released ids of the pieces above; text that is cut in any other way is an error."""

  def encode(self, text):
    return RELEASED[text]

  def special_id(self, name):
    return dict(zip(MARKERS, (OPEN, CLOSE, SEP, END)))[name]


def xtml(messages, tools=None, **options):
  return text_of(segments(read_conversation(messages, tools), ChatOptions(**options)))


def test_a_chat_has_the_released_ids():
  chat = read_conversation(
    [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello"}]
  )
  quiet = render(chat, ReleasedPieces(), QUIET)
  assert quiet.ids == [*SAID, OPEN, 12092, SEP]
  assert len(quiet.ids) == 37
  assert not any(quiet.is_output)
  assert render(chat, ReleasedPieces()).ids == [*EFFORT, *SAID, OPEN, 39964, SEP]


def test_a_whole_conversation_is_the_published_text():
  want = [
    '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
    "Here are the available tools, described in JSONSchema.\n\n```json\n"
    '[{"function":{"description":"Weather of a city","name":"get_weather","parameters":{"properties":'
    '{"city":{"type":"string"}},"required":["city"],"type":"object"}},"type":"function"},'
    '{"function":{"name":"clock"},"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to '
    "think in your thinking channel (not including the response channel), supported values include `low`, "
    "`medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=low`."
    "<|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="system"<|sep|>You are helpful.<|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="user"<|sep|>Weather <|open|>tools<|sep|>?<|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>I should ask.<|close|>think<|sep|>'
    "<|open|>response<|sep|>One moment.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>'
    'Nile <|sep|><|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="clock" index="2"<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="tool" tool="get_weather" index="1"<|sep|>sunny'
    "<|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="tool" tool="clock" index="2"<|sep|>12:00<|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Good.<|close|>think<|sep|>'
    "<|open|>response<|sep|>Sunny at noon.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="user"<|sep|>尼罗河 😀?<|close|>message<|sep|><|end_of_msg|>',
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>'
    "A river.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="system" type="tool-choice"<|sep|>The system is invoked with `tool_choice=none`.\n'
    "You MUST NOT call any tools in the next message.<|close|>message<|sep|><|end_of_msg|>",
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
  ]
  assert xtml(MESSAGES, [WEATHER, CLOCK], thinking_effort="low", tool_choice="none") == "".join(want)


def test_without_thinking_nothing_speaks_of_it():
  said = xtml(MESSAGES, thinking=False)
  assert "think" not in said
  assert "I should ask." not in said
  assert said.endswith('<|open|>message role="assistant"<|sep|><|open|>response<|sep|>')


def test_thoughts_of_spaces_are_none():
  said = [{"role": "assistant", "content": "x", "reasoning_content": thought} for thought in ("", " \n ")]
  assert xtml(said).count("<|open|>think<|sep|><|close|>think<|sep|>") == 2


def test_results_stand_in_the_order_of_the_calls_in_every_run_of_them():
  user = {"role": "user", "content": "wait"}
  asking = MESSAGES[2] | {"tool_calls": [CALLS[0], CALLS[1], {"id": "c", "function": {"name": "f"}}]}
  results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "cab"]
  heads = re.findall(r'tool="(\w+)" index="(\d)"<\|sep\|>(\w)<', xtml([asking, *results]))
  assert heads == [("get_weather", "1", "a"), ("clock", "2", "b"), ("f", "3", "c")]
  heads = re.findall(
    r'tool="(\w+)" index="(\d)"<\|sep\|>(\w)<', xtml([asking, *results[:2], user, results[2]])
  )
  assert heads == [("get_weather", "1", "a"), ("f", "2", "c"), ("clock", "3", "b")]


def test_arguments_are_typed():
  values = '{"s": "a&\\"b", "n": 5, "f": 1.5, "b": true, "z": null, "o": {"k": "é"}, "l": [1, "two"]}'
  call = {"id": "c", "function": {"name": 'a&b"c', "arguments": values}}
  said = xtml([{"role": "assistant", "content": "", "tool_calls": [call]}], generation_prompt=False)
  assert '<|open|>call tool="a&amp;b&quot;c" index="1"<|sep|>' in said
  written = {"s": ("string", 'a&"b'), "n": ("number", "5"), "f": ("number", "1.5"), "b": ("boolean", "true")}
  # spaces behind commas and colons, as six public copies of the published encoder agree
  written |= {"z": ("null", "null"), "o": ("object", '{"k": "é"}'), "l": ("array", '[1, "two"]')}
  for key, (kind, text) in written.items():
    assert f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>' in said


@pytest.mark.parametrize("stored", ['{"a": 1', "[1, 2]", '"text"', "NaN", '{"a": 1e999}', "[" * 100_000])
def test_arguments_that_are_no_object_are_kept_as_written(stored):
  call = {"id": "c", "function": {"name": "f", "arguments": stored}}
  said = xtml([{"role": "assistant", "tool_calls": [call]}])
  assert f'index="1"<|sep|><|open|>json type="object"<|sep|>{stored}<|close|>json<|sep|><|close|>call' in said


def test_tools_of_a_later_message_are_declared_there():
  said = xtml([{"role": "user", "content": "hi"}, {"role": "system", "tools": [CLOCK]}], thinking=False)
  assert (
    '<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n'
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n"
    '[{"function":{"name":"clock"},"type":"function"}]\n```<|close|>message<|sep|>'
  ) in said


def test_a_response_format_is_the_last_that_the_system_says():
  user = [{"role": "user", "content": "hi"}]
  raw = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
  )
  said = xtml(user, response_format={"type": "json_object"}, thinking=False)
  assert f"The system is invoked with `response_format=json_object`.\n{raw}<|close|>message" in said
  schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "b": 1, "a": 2}}}
  said = xtml(user, [CLOCK], response_format=schema, tool_choice="required", thinking=False)
  assert said.endswith(
    "\nYou MUST call tools in the next message.<|close|>message<|sep|><|end_of_msg|>"
    '<|open|>message role="system" type="response-format"<|sep|>'
    f"The system is invoked with `response_format=json_schema`.\n{raw}\nThe JSON data must match "
    'the following schema:\n```json\n{"a":2,"b":1,"type":"object"}\n```<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
  )
  assert xtml(user, response_format={"type": "text"}) == xtml(user)


def test_names_stand_in_the_head():
  said = xtml([{"role": role, "content": "x", "name": "n"} for role in ("system", "user", "assistant")])
  for role in ("system", "user", "assistant"):
    assert f'<|open|>message role="{role}" name="n"<|sep|>' in said


def test_a_required_call_needs_tools(tokenizer):
  with pytest.raises(MessageError, match="tool_choice"):
    render(read_conversation(MESSAGES[:2]), tokenizer, ChatOptions(tool_choice="required"))


def test_a_vocabulary_without_markers_is_refused():
  class Bare:
    def special_id(self, name):
      raise InputError(f"special token {name!r}: unknown")

  with pytest.raises(InputError, match=r"<\|open\|>"):
    render(read_conversation(MESSAGES), Bare())


def outputs(tokenizer, messages, **options):
  """The text of each stretch of tokens that the model itself generates."""
  rendered = render(read_conversation(messages, [WEATHER]), tokenizer, ChatOptions(**options))
  stretches, last = [], False
  for token, is_output in zip(rendered.ids, rendered.is_output, strict=True):
    stretches += [[]] if is_output and not last else []
    if is_output:
      stretches[-1].append(token)
    last = is_output
  return [tokenizer.decode(stretch) for stretch in stretches]


def test_only_what_the_model_says_is_output(tokenizer):
  first, second, third = outputs(tokenizer, MESSAGES)
  assert first.startswith(
    "I should ask.<|close|>think<|sep|><|open|>response<|sep|>One moment.<|close|>response"
  )
  assert first.endswith("<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>")
  assert second == (
    "Good.<|close|>think<|sep|><|open|>response<|sep|>Sunny at noon."
    "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
  )
  assert third.startswith("<|close|>think<|sep|><|open|>response<|sep|>A river.")
  assert outputs(tokenizer, MESSAGES, thinking=False)[1:] == [
    f"{text}<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    for text in ("Sunny at noon.", "A river.")
  ]


def test_an_answer_of_weight_0_is_no_output(tokenizer):
  ignored = [*MESSAGES[:5], MESSAGES[5] | {"weight": 0}, *MESSAGES[6:]]
  told = outputs(tokenizer, MESSAGES)
  assert outputs(tokenizer, ignored) == [told[0], told[2]]


@given(messages=conversations(), thinking=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_ids_are_the_text_with_its_markers_and_no_others(tokenizer, messages, thinking):
  conversation, options = read_conversation(messages, [WEATHER]), ChatOptions(thinking=thinking)
  walked = list(segments(conversation, options))
  ids = render(conversation, tokenizer, options).ids
  assert tokenizer.decode(ids) == text_of(walked)
  markers = {tokenizer.special_id(name) for name in MARKERS}
  assert [token for token in ids if token >= 320] == [
    tokenizer.special_id(segment.text) for segment in walked if segment.is_marker
  ]
  assert {token for token in ids if token >= 320} <= markers


@given(messages=conversations(), thinking=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_model_is_asked_as_it_was_taught(tokenizer, messages, thinking):
  """The prompt before each answer, and its output tokens, are the rendering that training sees."""
  taught = ChatOptions(thinking=thinking, generation_prompt=False)
  for end in [i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]:
    if end == 1:
      continue
    before = read_conversation(messages[: end - 1], [WEATHER])
    prompt = render(before, tokenizer, ChatOptions(thinking=thinking))
    whole = render(read_conversation(messages[:end], [WEATHER]), tokenizer, taught)
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    assert not any(whole.is_output[len(prompt.ids) - 3 : len(prompt.ids)])
    assert all(whole.is_output[len(prompt.ids) :])
    assert whole.ids[-1] == tokenizer.special_id("<|end_of_msg|>")
