"""Rows of chats: whole, apart from each other, and counted by the loss where the assistant speaks."""

import json

import numpy as np
import pytest

from MaxText.common.errors import CheckpointError, InputError

pytest.importorskip("grain", reason="grain is not installed; pip install '.[train]' brings it")

from MaxText.tokenizers.chat.formats import chat_format  # noqa: E402
from MaxText.tokenizers.chat.options import ChatOptions  # noqa: E402
from MaxText.tokenizers.registry import load_tokenizer  # noqa: E402
from MaxText.training.chat_data import ChatExample  # noqa: E402
from MaxText.training.chat_rows import Chats, find_chats, packed_chats  # noqa: E402
from tests.test_tiny_model import DIRECTORY  # noqa: E402

LENGTHS = (1, 2, 3, 7, 8, 5, 4, 9, 2)
FORM = dict(batch=2, length=8, epochs=1)


@pytest.fixture(scope="module")
def chats():
  """Chats of all lengths up to a row; ids are unique, so that each token can be followed."""
  rng, start, examples = np.random.default_rng(0), 1, []
  for length in LENGTHS:
    output = rng.random(length) < 0.5
    output[0] = False
    examples.append(ChatExample(np.arange(start, start + length, dtype=np.int32), output))
    start += length
  return Chats(examples)


def learnt(batches):
  """(input, target) pairs that the loss counts."""
  pairs = []
  for batch in batches:
    counts = batch["targets_segmentation"] != 0
    pairs += list(zip(batch["inputs"][counts].tolist(), batch["targets"][counts].tolist()))
  return pairs


def test_the_loss_counts_exactly_the_assistant_s_tokens(chats):
  want = []
  for number in range(len(chats)):
    example = chats[number]
    for t in np.flatnonzero(example.is_output):
      want.append((int(example.ids[t - 1]), int(example.ids[t])))
  got = learnt(packed_chats(chats, **FORM))
  assert got == want and len(got) == chats.learnt


def test_no_chat_is_cut_and_none_meets_another(chats):
  whole = {tuple(chats[n].ids[:-1].tolist()) for n in range(len(chats)) if len(chats[n].ids) > 1}
  found = set()
  for batch in packed_chats(chats, **FORM):
    for row in range(2):
      segments = batch["inputs_segmentation"][row]
      for segment in range(1, segments.max() + 1):
        ids = batch["inputs"][row][segments == segment]
        # the last token of the last chat of a full row is a target only
        found |= {tuple(ids.tolist()), tuple(ids[:-1].tolist())}
        assert np.all(np.diff(ids) == 1)
  assert whole <= found


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_stored_position_goes_on_exactly(chats, stop):
  form = FORM | {"epochs": 3, "seed": 5}
  unbroken = [batch["inputs"].tolist() for batch in packed_chats(chats, **form)]
  iterator = iter(packed_chats(chats, **form))
  for _ in range(stop):
    next(iterator)
  state = json.loads(json.dumps(iterator.get_state()))
  resumed = iter(packed_chats(chats, **form))
  resumed.set_state(state)
  assert [batch["inputs"].tolist() for batch in resumed] == unbroken[stop:]


def test_a_position_in_other_chats_is_refused(chats):
  state = iter(packed_chats(chats, **FORM)).get_state()
  other = iter(packed_chats(Chats([chats[0]]), **FORM))
  with pytest.raises(CheckpointError, match="other data: chats 9 then, 1 now"):
    other.set_state(state)


@pytest.fixture(scope="module")
def tiny():
  return chat_format(load_tokenizer(DIRECTORY, 1024))


def test_a_conversation_with_tools_thoughts_and_two_turns_is_masked(tiny, tmp_path):
  tools = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
  ]
  call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
  messages = [
    {"role": "system", "content": "SYSTEM"},
    {"role": "user", "content": "FIRST"},
    {"role": "assistant", "reasoning_content": "THOUGHT", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "c1", "content": "RESULT"},
    {"role": "assistant", "content": "ANSWER"},
    {"role": "user", "content": "SECOND"},
    {"role": "assistant", "content": "LAST"},
  ]
  path = tmp_path / "chats.jsonl"
  path.write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
  chats = find_chats("grain_train_files", str(path), tiny, 2048, ChatOptions(thinking_effort=None))
  (batch,) = packed_chats(chats, batch=1, length=2048, epochs=1)
  tokenizer = load_tokenizer(DIRECTORY, 1024)
  counts = batch["targets_segmentation"][0] != 0
  said = tokenizer.decode(batch["targets"][0][counts].tolist())
  rest = tokenizer.decode(batch["targets"][0][~counts & (batch["targets"][0] != 0)].tolist())
  for word in ("THOUGHT", "ANSWER", "LAST"):
    assert word in said and word not in rest
  for word in ("SYSTEM", "FIRST", "RESULT", "SECOND"):
    assert word in rest and word not in said


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("chats.txt", "x", "chats.txt: expected .jsonl"),
    ("chats.jsonl", "", "the file is empty"),
    ("chats.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "chats.jsonl:1: .*assistant"),
    (
      "chats.jsonl",
      '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "'
      + "long " * 99
      + '"}]}',
      r"chats.jsonl:1: the conversation has \d+ tokens, expected at most 65",
    ),
  ],
)
def test_what_cannot_be_learnt_is_one_line(tiny, tmp_path, name, content, message):
  path = tmp_path / name
  path.write_text(content)
  with pytest.raises(InputError, match=message):
    find_chats("grain_train_files", str(path), tiny, 64, ChatOptions(thinking_effort=None))


def test_chats_have_no_default(tiny):
  with pytest.raises(InputError, match="grain_train_files: needed: a .jsonl file of conversations"):
    find_chats("grain_train_files", None, tiny, 64, ChatOptions())
