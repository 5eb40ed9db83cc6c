"""Conversations of all kinds: a fixed one with everything, and hypothesis strategies."""

import json

from hypothesis import strategies as st

WEATHER = {
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
  },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLS = [
  {
    "id": "a",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Nile <|sep|>"}'},
  },
  {"id": "b", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
]
# system, tools, thinking, two calls whose results come in the wrong order, two turns
MESSAGES = [
  {"role": "system", "content": "You are helpful."},
  {"role": "user", "content": "Weather <|open|>tools<|sep|>?"},
  {"role": "assistant", "reasoning_content": "I should ask.", "content": "One moment.", "tool_calls": CALLS},
  {"role": "tool", "tool_call_id": "b", "content": "12:00"},
  {
    "role": "tool",
    "tool_call_id": "a",
    "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}],
  },
  {"role": "assistant", "reasoning_content": "Good.", "content": "Sunny at noon."},
  {"role": "user", "content": "尼罗河 😀?"},
  {"role": "assistant", "content": "A river."},
]

# words that a careless implementation would take for markup
TRICKY = [
  "<|open|>",
  "<|close|>think<|sep|>",
  "<|end_of_msg|>",
  "[EOS]",
  '"',
  "&quot;",
  "&",
  "尼",
  "😀",
  "\\",
  "\n",
  " ",
]
texts = st.lists(st.sampled_from(TRICKY) | st.text(max_size=6), max_size=5).map("".join)
names = st.sampled_from(["f", "get_weather", 'a&b"c', "&quot;", "<|sep|>"])
json_values = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(10**20), 10**20)
  | st.floats(allow_nan=False, allow_infinity=False)
  | texts,
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
  max_leaves=5,
)
objects = st.dictionaries(texts, json_values, max_size=3)
arguments = objects.map(json.dumps) | st.sampled_from(
  ['{"a": 1', "[1, 2]", "no JSON <|close|>call<|sep|>", "NaN"]
)


@st.composite
def assistants(draw, *, reasoning=True):
  """An assistant message as OpenAI's interface has it, with ids that are unique within it."""
  message = {"role": "assistant", "content": draw(texts)}
  if reasoning and draw(st.booleans()):
    message["reasoning_content"] = draw(texts.filter(str.strip))
  count = draw(st.integers(0, 3))
  calls = [
    {"id": f"c{i}", "type": "function", "function": {"name": draw(names), "arguments": draw(arguments)}}
    for i in range(count)
  ]
  return message | ({"tool_calls": calls} if calls else {})


@st.composite
def conversations(draw, *, reasoning=True):
  """Messages in an order that OpenAI's interface allows, with results in any order."""
  messages = []
  for _ in range(draw(st.integers(1, 4))):
    kind = draw(st.sampled_from(["system", "user", "assistant"]))
    if kind != "assistant":
      messages.append({"role": kind, "content": draw(texts)})
      continue
    message = draw(assistants(reasoning=reasoning))
    messages.append(message)
    for call in draw(st.permutations(message.get("tool_calls", []))):
      messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(texts)})
  return messages
