"""Chats as training data: exactly the assistant's tokens are learnt, and a bad line names its place."""

import json
from pathlib import Path

import numpy as np
import pytest

from MaxText.common.errors import InputError
from MaxText.tokenizers.chat.formats import chat_format
from MaxText.tokenizers.chat.messages import read_conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.training.chat_data import example_of, read_examples
from tests.tokenizers.chat.samples import CLOCK, MESSAGES, WEATHER

TINY = Path(__file__).parents[2] / "MaxText/assets/kimi-k3-tiny"
USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.fixture(scope="module")
def tokenizer():
  return KimiTokenizer.from_directory(TINY)


@pytest.fixture(scope="module")
def chat(tokenizer):
  return chat_format(tokenizer)


def example(chat, line, **options):
  text = line if isinstance(line, str) else json.dumps(line)
  return example_of(text, chat, "data.jsonl:7", max_tokens=4096, options=ChatOptions(**options))


def test_exactly_what_the_assistant_says_is_learnt(chat, tokenizer):
  """System, tools, thinking, calls and results, two turns."""
  told = example(chat, {"messages": MESSAGES, "tools": [WEATHER, CLOCK], "id": "x"})
  assert (
    told.ids.dtype == np.int32 and told.is_output.dtype == bool and told.ids.shape == told.is_output.shape
  )
  edges = np.flatnonzero(np.diff(told.is_output.astype(int), prepend=0, append=0)).reshape(-1, 2)
  learnt = [tokenizer.decode(told.ids[start:stop]) for start, stop in edges]
  end = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
  assert learnt == [
    "I should ask.<|close|>think<|sep|><|open|>response<|sep|>One moment.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Nile <|sep|><|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    "<|close|>message<|sep|><|end_of_msg|>",
    f"Good.<|close|>think<|sep|><|open|>response<|sep|>Sunny at noon.{end}",
    f"<|close|>think<|sep|><|open|>response<|sep|>A river.{end}",
  ]
  rest = tokenizer.decode(told.ids[~told.is_output])
  assert rest.count('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>') == 3
  for text in (
    "You are helpful.",
    "Weather <|open|>tools<|sep|>?",
    "sunny",
    "12:00",
    "尼罗河 😀?",
    '"name":"clock"',
  ):
    assert text in rest


def test_serving_asks_with_the_ids_that_training_saw(chat):
  for thinking in (True, False):
    messages = [{k: v for k, v in m.items() if thinking or k != "reasoning_content"} for m in MESSAGES]
    told = example(chat, {"messages": messages, "tools": [WEATHER]}, thinking=thinking)
    prompt = chat.render(read_conversation(messages[:-1], [WEATHER]), ChatOptions(thinking=thinking)).ids
    assert list(told.ids[: len(prompt)]) == prompt
    assert told.is_output[len(prompt) :].all() and not told.is_output[len(prompt) - 1]


def test_the_first_token_is_never_learnt(chat):
  assert not example(chat, {"messages": [SAID]}, thinking_effort=None).is_output[0]


LINES = [
  ("{", r"data.jsonl:7: line: not JSON: Expecting"),
  ("[" * 100_000, r"data.jsonl:7: line: not JSON"),
  ('{"messages": NaN}', r"data.jsonl:7: line: not JSON: NaN is no JSON"),
  ("[]", r"data.jsonl:7: line: expected an object with 'messages', got list"),
  ("{}", r"data.jsonl:7: line: no key 'messages', only an empty object"),
  ({"prompt": "x"}, r"no key 'messages', only 'prompt'"),
  ({"mesages": [USER, SAID]}, r"data.jsonl:7: mesages: unknown key, did you mean 'messages'\?"),
  ({"messages": [USER, SAID], "tool": [CLOCK]}, r"data.jsonl:7: tool: unknown key, did you mean 'tools'\?"),
  ({"messages": []}, r"data.jsonl:7: messages: expected at least one message, got none"),
  ({"messages": [USER]}, r"messages: expected an assistant message to learn, but there is none"),
  ({"messages": [USER, SAID | {"weight": 0}]}, r"to learn, but all of them have weight 0"),
  (
    {"messages": [USER, {"role": "assistent", "content": "x"}]},
    r"7: messages\[1\].role: .* did you mean 'assistant'",
  ),
  (
    {"messages": [USER, SAID], "tools": [{"function": {}}]},
    r"data.jsonl:7: tools\[0\].function: no key 'name'",
  ),
]


@pytest.mark.parametrize("line, fault", LINES, ids=range(len(LINES)))
def test_a_bad_line_is_one_line_with_its_place(chat, line, fault):
  with pytest.raises(InputError, match=fault) as error:
    example(chat, line)
  assert "\n" not in str(error.value)


def test_thoughts_are_not_lost_in_silence(chat):
  line = {"messages": [USER, SAID | {"reasoning_content": "why"}]}
  with pytest.raises(InputError, match=r"data.jsonl:7: messages\[1\].reasoning_content: would be lost"):
    example(chat, line, thinking=False)


def test_a_conversation_that_is_too_long_is_refused_with_both_numbers(chat):
  line = json.dumps({"messages": [USER, SAID]})
  tokens = len(example(chat, line).ids)
  assert len(example_of(line, chat, "a:1", max_tokens=tokens).ids) == tokens
  with pytest.raises(
    InputError, match=f"a:1: the conversation has {tokens} tokens, expected at most {tokens - 1}"
  ):
    example_of(line, chat, "a:1", max_tokens=tokens - 1)


def test_a_file_is_read_in_its_order(chat, tmp_path, tokenizer):
  path = tmp_path / "chats.jsonl"
  told = [{"messages": [USER, SAID | {"content": text}]} for text in ("one", "two")]
  path.write_text("\n".join(map(json.dumps, told)).replace("\n", "\n\n  \n") + "\n")
  examples = list(read_examples(path, chat, max_tokens=4096))
  assert [word in tokenizer.decode(e.ids) for e, word in zip(examples, ("one", "two"))] == [True, True]
  path.write_text("\n\n" + json.dumps({"messages": [USER]}))
  with pytest.raises(InputError, match=r"chats.jsonl:3: messages: expected an assistant"):
    list(read_examples(path, chat, max_tokens=4096))


def test_a_file_without_a_conversation_is_refused(chat, tmp_path):
  path = tmp_path / "chats.jsonl"
  for content in (b"", b"\n \n"):
    path.write_bytes(content)
    with pytest.raises(InputError, match="chats.jsonl: no conversation in the file"):
      list(read_examples(path, chat, max_tokens=4096))
  path.write_bytes(b'\n{"a": "\xff"}')
  with pytest.raises(InputError, match="chats.jsonl:2: not UTF-8: invalid start byte at byte 7 of the line"):
    list(read_examples(path, chat, max_tokens=4096))
  with pytest.raises(InputError, match="cannot be read: No such file"):
    list(read_examples(tmp_path / "none.jsonl", chat, max_tokens=4096))
