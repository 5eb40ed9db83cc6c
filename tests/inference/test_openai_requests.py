"""Whatever a client sends is either served or refused as its mistake: never a defect, never a number lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.common.errors import InputError
from MaxText.inference.openai_jobs import ServedModel, chat_drafts, completion_drafts
from MaxText.inference.openai_requests import ChatBody, CompletionBody, RequestError, read_body
from MaxText.tokenizers.chat.formats import chat_format
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.locations import TINY
from tests.tokenizers.chat.samples import MESSAGES, WEATHER

TOKENIZER = KimiTokenizer.from_directory(TINY)
MODEL = ServedModel("tiny", TOKENIZER, chat_format(TOKENIZER), 1024, (769, 770), 4096, 7)
CHAT = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "seed": 5, "temperature": 0.5, "n": 2}
COMPLETION = {"model": "tiny", "prompt": "x", "stop": ["a"], "logprobs": 2, "stop_token_ids": [5]}

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
odd = st.recursive(
  plain | st.sampled_from([10**400, "\ud800", "none", "high", 2**32 - 1, -1, 0, 1]),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
  max_leaves=6,
)
KINDS = {"chat": (ChatBody, chat_drafts, CHAT), "completion": (CompletionBody, completion_drafts, COMPLETION)}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_odd_field_is_served_or_refused(kind, data):
  form, drafts, body = KINDS[kind]
  field = data.draw(st.sampled_from(sorted(form.model_fields)) | st.text(max_size=4))
  body = body | {field: data.draw(odd)}
  try:
    made = drafts(MODEL, read_body(form, json.dumps(body).encode()))
  except InputError as refusal:
    assert "\n" not in str(refusal)
    return
  assert made and all(draft.ids and max(draft.ids) < 1024 for draft in made)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_request_are_refused(data):
  with pytest.raises(RequestError):
    read_body(ChatBody, data)


def test_the_settings_are_those_that_were_asked_for():
  [first, second] = chat_drafts(
    MODEL,
    read_body(
      ChatBody,
      json.dumps(
        CHAT
        | {"max_completion_tokens": 9, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1}
        | {"logprobs": True, "top_logprobs": 4, "frequency_penalty": -1, "stop_token_ids": [3]}
      ).encode(),
    ),
  )
  told = first.settings
  assert (told.max_new_tokens, told.temperature, told.top_p, told.top_k, told.min_p) == (9, 0.5, 0.5, 7, 0.1)
  assert (told.presence_penalty, told.frequency_penalty, told.logprobs) == (1, -1, 4)
  assert told.stop_ids == (769, 770, 3) and (told.seed, second.settings.seed) == (5, 6)


def test_a_chat_without_numbers_draws_from_the_model_to_the_end_of_the_context():
  [draft] = chat_drafts(MODEL, ChatBody(model="tiny", messages=MESSAGES))
  told = draft.settings
  assert (told.temperature, told.top_p, told.max_new_tokens, told.logprobs) == (1.0, 1.0, 4096, 0)
