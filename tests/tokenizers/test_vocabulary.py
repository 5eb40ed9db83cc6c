"""The published file format: what it gives, and what is refused in one line."""

import itertools
import json

import pytest

from MaxText.common.errors import CheckpointError
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.training import BYTES
from MaxText.tokenizers.vocabulary import (
  CONFIG_FILE,
  VOCABULARY_FILE,
  read_ranks,
  read_specials,
  write_vocabulary,
)

PUBLISHED_IDS = {
  "[BOS]": 163584,
  "[EOS]": 163585,
  "<|end_of_msg|>": 163586,
  "<|open|>": 163587,
  "<|close|>": 163588,
  "<|sep|>": 163589,
  "[start_header_id]": 163590,
  "[end_header_id]": 163591,
  "<|reserved_token_163592|>": 163592,
  "[EOT]": 163593,
  "<|media_begin|>": 163602,
  "<|media_content|>": 163603,
  "<|media_end|>": 163604,
  "<|media_pad|>": 163605,
  "<osagent_mode>": 163649,
  "<|reserved_token_163837|>": 163837,
  "[UNK]": 163838,
  "[PAD]": 163839,
}


@pytest.fixture
def files(tmp_path):
  write_vocabulary(tmp_path, {token: rank for rank, token in enumerate(BYTES)})
  return tmp_path / VOCABULARY_FILE, tmp_path / CONFIG_FILE


def test_a_vocabulary_of_the_published_size_has_the_published_ids(tmp_path):
  longer = (bytes(token) for width in (2, 3) for token in itertools.product(range(256), repeat=width))
  tokens = [*BYTES, *itertools.islice(longer, 163_584 - 256)]
  write_vocabulary(tmp_path, {token: rank for rank, token in enumerate(tokens)})
  tokenizer = KimiTokenizer.from_directory(tmp_path, vocab_size=163_840)
  assert {name: tokenizer.special_id(name) for name in PUBLISHED_IDS} == PUBLISHED_IDS
  assert tokenizer.stop_ids == {163585, 163586}
  assert tokenizer.decode([163838], skip_special=True) == ""


def test_bytes_have_the_published_ids():
  # read off ids that the released tokenizer gives: '!', '"', '0', 'a', NUL, newline, space
  assert [BYTES.index(byte) for byte in (b"!", b'"', b"0", b"a", b"\0", b"\n", b" ")] == [
    0,
    1,
    15,
    64,
    188,
    198,
    220,
  ]


def test_writing_and_reading_is_the_identity(tmp_path):
  ranks = {token: rank for rank, token in enumerate([*BYTES, b"\n\n", b"  ", "尼".encode()])}
  write_vocabulary(tmp_path, ranks)
  assert read_ranks(tmp_path / VOCABULARY_FILE) == ranks


@pytest.mark.parametrize(
  "line, message",
  [
    ("YWI=", r":257: expected 'BASE64 RANK', got b'YWI='"),
    ("YWI= x", r":257: expected 'BASE64 RANK'"),
    ("Y*I= 256", r":257: expected 'BASE64 RANK'"),
    ("YWI 256", r":257: expected 'BASE64 RANK'"),
    ("YQ== 256", r":257: token b'a' has rank 64 already, got 256"),
    ("YWI= 64", r"rank 64 is given to both b'a' and b'ab'"),
    ("YWI= 300", r"257 tokens, but no token has rank 256"),
    ("YWI= -1", r"257 tokens, but no token has rank 256"),
  ],
)
def test_a_bad_line_is_named(files, line, message):
  with files[0].open("a") as file:
    file.write(f"{line}\n")
  with pytest.raises(CheckpointError, match=message):
    read_ranks(files[0])


def test_blank_lines_are_skipped(files):
  files[0].write_text(files[0].read_text() + "\nYWI= 256\n")
  assert read_ranks(files[0])[b"ab"] == 256


def test_every_byte_needs_a_rank(tmp_path):
  write_vocabulary(tmp_path, {token: rank for rank, token in enumerate(BYTES[:-1])})
  with pytest.raises(CheckpointError, match="no token for byte 0xad"):
    read_ranks(tmp_path / VOCABULARY_FILE)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(CheckpointError, match=r"tiktoken\.model: cannot be read: No such file"):
    read_ranks(tmp_path / VOCABULARY_FILE)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"added_tokens_decoder": None}, "expected added_tokens_decoder"),
    ({"added_tokens_decoder": {"x": {"content": "a", "special": True}}}, "expected added_tokens_decoder"),
    ({"added_tokens_decoder": {"300": {"content": "a"}}}, "expected added_tokens_decoder"),
    ({"added_tokens_decoder": {"255": {"content": "a", "special": True}}}, "expected 256 to 511, got 255"),
    ({"added_tokens_decoder": {"512": {"content": "a", "special": True}}}, "expected 256 to 511, got 512"),
    (
      {"added_tokens_decoder": {str(i): {"content": "a", "special": True} for i in (300, 301)}},
      "'a' names both id 300 and id 301",
    ),
    ({"eos_token": "[EOF]"}, r"eos_token '\[EOF\]' is not in added_tokens_decoder, did you mean '\[EO"),
  ],
)
def test_a_bad_special_token_is_named(files, change, message):
  config = json.loads(files[1].read_text()) | change
  files[1].write_text(json.dumps(config))
  with pytest.raises(CheckpointError, match=message) as caught:
    read_specials(files[1], first_id=256)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text, message", [("{", "not JSON"), ("[]", "expected a JSON object, got list")])
def test_a_file_that_is_no_json_object_is_refused(files, text, message):
  files[1].write_text(text)
  with pytest.raises(CheckpointError, match=message):
    read_specials(files[1], first_id=256)


def test_kimi_linear_stops_at_its_own_end_of_turn(files):
  config = json.loads(files[1].read_text())
  config["added_tokens_decoder"]["258"]["content"] = "<|im_end|>"
  config["eos_token"] = {"content": "[EOS]", "lstrip": False}  # the long form of the same key
  files[1].write_text(json.dumps(config))
  assert read_specials(files[1], first_id=256).stop_ids == {257, 258}
