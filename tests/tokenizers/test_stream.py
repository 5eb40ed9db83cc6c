"""A streamed answer is the answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.common.errors import InputError
from MaxText.tokenizers.stream import StreamDecoder
from MaxText.tokenizers.training import BYTES

NILE = "尼罗河 😀 naïve"


@pytest.mark.parametrize("bytewise", [False, True])
def test_no_character_is_ever_split(tokenizer, bytewise):
  ids = [BYTES.index(bytes([byte])) for byte in NILE.encode()] if bytewise else tokenizer.encode(NILE)
  stream = StreamDecoder(tokenizer)
  parts = [stream.push(token) for token in ids]
  assert stream.flush() == ""
  assert "".join(parts) == NILE
  assert "\ufffd" not in "".join(parts)


@given(ids=st.lists(st.integers(0, 575), max_size=40), skip_special=st.booleans())
@settings(max_examples=100, deadline=None)
def test_joined_parts_equal_the_whole_decode_of_any_ids(tokenizer, ids, skip_special):
  stream = StreamDecoder(tokenizer, skip_special=skip_special)
  parts = [stream.push(token) for token in ids]
  assert "".join(parts) + stream.flush() == tokenizer.decode(ids, skip_special=skip_special)


@given(text=st.text(max_size=30))
@settings(max_examples=50, deadline=None)
def test_text_streams_without_replacement_characters(tokenizer, text):
  stream = StreamDecoder(tokenizer)
  parts = [stream.push(token) for token in tokenizer.encode(text)]
  assert "".join(parts) == text
  assert stream.flush() == ""


def test_an_unfinished_character_is_replaced_once_at_the_end(tokenizer):
  stream = StreamDecoder(tokenizer)
  assert [stream.push(BYTES.index(bytes([byte]))) for byte in b"a\xf0\x9f\x98"] == ["a", "", "", ""]
  assert stream.flush() == "\ufffd"
  assert stream.flush() == ""


def test_control_tokens_are_left_out_and_markers_kept(tokenizer):
  stream = StreamDecoder(tokenizer)
  assert [stream.push(tokenizer.special_id(name)) for name in ("[EOS]", "<|sep|>")] == ["", "<|sep|>"]


def test_a_foreign_id_is_refused(tokenizer):
  with pytest.raises(InputError, match="token id 576"):
    StreamDecoder(tokenizer).push(576)
