"""What a user sends: accepted forms, and one line that names the place of each mistake."""

import pytest

from MaxText.common.errors import UserError
from MaxText.tokenizers.chat.messages import (
  AssistantMessage,
  MessageError,
  TextMessage,
  ToolCall,
  ToolResult,
  read_conversation,
)
from MaxText.tokenizers.chat.options import ChatOptions
from tests.tokenizers.chat.samples import CALLS, MESSAGES, WEATHER

USER = {"role": "user", "content": "hi"}
ASKING = {"role": "assistant", "content": None, "tool_calls": CALLS}


def call(**changes):
  return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"} | changes]}


def test_a_conversation_with_everything_is_read():
  conversation = read_conversation(MESSAGES, [WEATHER])
  assert conversation.tools == (WEATHER,)
  assert conversation.messages[0] == TextMessage("system", ("You are helpful.",))
  assert conversation.messages[2] == AssistantMessage(
    ("One moment.",),
    "I should ask.",
    (ToolCall("get_weather", '{"city": "Nile <|sep|>"}', "a"), ToolCall("clock", "{}", "b")),
  )
  assert conversation.messages[3:5] == (ToolResult(("12:00",), 1), ToolResult(("sun", "ny"), 0))


def test_what_the_openai_client_sends_back_is_read():
  sent = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
  sent |= {"function_call": None, "tool_calls": None, "reasoning_content": None}
  assert read_conversation([sent]).messages == (AssistantMessage(("hi",)),)


def test_other_forms_of_the_same_are_read():
  assert read_conversation([{"role": "developer", "content": "x"}]).messages == (
    TextMessage("system", ("x",)),
  )
  told = [{"role": "assistant", "reasoning": "why", "content": "x"}]
  assert read_conversation(told).messages == (AssistantMessage(("x",), "why"),)
  parsed = call(function={"name": "f", "arguments": {"k": "é"}})
  assert read_conversation([parsed]).messages[0].tool_calls == (ToolCall("f", '{"k": "é"}', "a"),)


def test_results_without_ids_answer_calls_without_ids_in_order():
  asking = call(id=None, function={"name": "f"})
  asking["tool_calls"] *= 2
  results = [{"role": "tool", "content": text} for text in "xy"]
  messages = read_conversation([asking, *results]).messages
  assert messages[1:] == (ToolResult(("x",), 0), ToolResult(("y",), 1))
  with pytest.raises(MessageError, match="expected 2 results without ids, in order, got None"):
    read_conversation([asking, *results, results[0]])


MISTAKES = [
  (None, "messages: expected a list, got null"),
  ([], "messages: expected at least one message, got none"),
  (["hi"], r"messages\[0\]: expected an object, got str"),
  ([{"rol": "user", "content": "x"}], r"messages\[0\]: no key 'role', but there is 'rol'$"),
  ([{"role": "usr", "content": "x"}], r"\[0\].role: expected one of .*, got 'usr', did you mean 'user'\?"),
  ([{"role": "function", "content": "x"}], r"\.role: 'function' is of the old interface, use 'tool'"),
  ([USER, {"role": "user", "contents": "x"}], r"\[1\].contents: unknown key, did you mean 'content'\?"),
  ([{"role": "user"}], r"messages\[0\]: no key 'content'"),
  ([{"role": "user", "content": None}], r"content: expected a text or a list of text parts, got null"),
  ([{"role": "user", "content": ["x"]}], r"content\[0\]: expected an object, got str"),
  ([{"role": "user", "content": [{"type": "txt"}]}], r"content\[0\].type: expected 'text', got 'txt'"),
  ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: no key 'text'"),
  ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
   r"messages\[0\].content\[1\]: 'image_url' cannot be read: only text is supported, no images"),
  ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\].name: expected a text, got int"),
  ([{"role": "assistant", "content": None}], r"\[0\]: an assistant message needs content or tool_calls"),
  ([{"role": "assistant", "content": "x", "weight": 2}], r"\.weight: expected 0 or 1, got 2"),
  ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], r"_call: .* use tool_calls"),
  ([{"role": "assistant", "tool_calls": {"id": 1}}], r"tool_calls: expected a list, got dict"),
  ([call()], r"messages\[0\].tool_calls\[0\]: no key 'function'"),
  ([call(type="tool")], r"tool_calls\[0\].type: expected 'function', got 'tool'"),
  ([call(function={"nam": "f"})], r"tool_calls\[0\].function.nam: unknown key, did you mean 'name'\?"),
  ([call(function={"name": ""})], r"function.name: expected a function's name, got an empty text"),
  ([call(function={"name": "f", "arguments": 5})], r"function.arguments: expected JSON in a text, got int"),
  ([{**ASKING, "tool_calls": [CALLS[0], CALLS[0]]}], r"tool_calls\[1\].id: 'a' is the id of an earlier call"),
  ([USER, {"role": "tool", "tool_call_id": "a", "content": "x"}],
   r"messages\[1\]: a tool result, but the last assistant message before it has no tool_calls"),
  ([{"role": "assistant", "tool_calls": [{"id": "call_1", "function": {"name": "f"}}]},
    {"role": "tool", "tool_call_id": "cal_1", "content": "x"}],
   r"messages\[1\].tool_call_id: expected one of 'call_1', got 'cal_1', did you mean 'call_1'\?"),
  ([ASKING, {"role": "tool", "content": "x"}], r"tool_call_id: expected one of 'a', 'b', got None"),
  ([ASKING, *[{"role": "tool", "tool_call_id": "a", "content": "x"}] * 2],
   r"messages\[2\].tool_call_id: call 'a' has a result already"),
  ([{"role": "system", "content": "x", "tools": [WEATHER]}], r"tools: expected either tools or content"),
]  # fmt: skip


@pytest.mark.parametrize(
  "messages, fault", MISTAKES, ids=lambda x: (x or "")[:40] if isinstance(x, str) else ""
)
def test_a_mistake_is_one_line_with_its_place(messages, fault):
  with pytest.raises(MessageError, match=fault) as error:
    read_conversation(messages)
  assert isinstance(error.value, UserError)
  assert "\n" not in str(error.value)
  assert str(error.value).startswith(error.value.param)


TOOL_MISTAKES = [
  ({}, "tools: expected a list, got dict"),
  (["f"], r"tools\[0\]: expected an object, got str"),
  ([{"type": "function"}], r"tools\[0\]: no key 'function'"),
  ([{"type": "web_search"}], r"tools\[0\].type: expected 'function', got 'web_search'"),
  ([{"function": {"parameters": {}}}], r"tools\[0\].function: no key 'name'"),
  (
    [{"function": {"name": "f", "parameter": {}}}],
    r"function.parameter: unknown key, did you mean 'parameters'\?",
  ),
  ([{"function": {"name": "f", "parameters": "{}"}}], r"parameters: expected a JSON schema, got str"),
  ([WEATHER, WEATHER], r"tools\[1\].function.name: 'get_weather' is declared twice"),
]


@pytest.mark.parametrize("tools, fault", TOOL_MISTAKES, ids=range(len(TOOL_MISTAKES)))
def test_a_wrong_tool_is_one_line_with_its_place(tools, fault):
  with pytest.raises(MessageError, match=fault):
    read_conversation([USER], tools)


OPTION_MISTAKES = [
  ({"thinking_effort": "medium"}, "reasoning_effort: expected one of low, high, max, got 'medium'"),
  ({"tool_choice": "requird"}, "tool_choice: .* got 'requird', did you mean 'required'"),
  ({"tool_choice": {"type": "function"}}, "tool_choice: a function by name is not supported"),
  ({"response_format": "json_object"}, "response_format: expected an object with 'type', got str"),
  ({"response_format": {"type": "json"}}, "response_format.type: expected one of .* got 'json'"),
  (
    {"response_format": {"type": "json_schema"}},
    r"response_format.json_schema.schema: expected a JSON schema",
  ),
]


@pytest.mark.parametrize("options, fault", OPTION_MISTAKES, ids=range(len(OPTION_MISTAKES)))
def test_a_wrong_option_is_one_line(options, fault):
  with pytest.raises(MessageError, match=fault):
    ChatOptions(**options)


def test_a_call_cannot_be_required_without_tools():
  options = ChatOptions(tool_choice="required")
  options.check(read_conversation([USER], [WEATHER]))
  options.check(read_conversation([USER, {"role": "system", "content": "", "tools": [WEATHER]}]))
  with pytest.raises(MessageError, match="tool_choice: 'required', but there are no tools"):
    options.check(read_conversation([USER]))
