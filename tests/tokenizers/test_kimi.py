"""Laws of the tokenizer: round trip, ordinary encoding, the split pattern, the stack guard."""

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from MaxText.common.errors import CheckpointError, InputError
from MaxText.tokenizers import kimi
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.training import BYTES, count_pieces
from MaxText.tokenizers.vocabulary import SpecialTokens

# the published pattern in another engine: look-aheads instead of set intersection
_UPPER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
_LOWER = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LOOK_AHEAD = regex.compile(
  r"\p{Han}+"
  rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_TAIL}"
  rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_TAIL}"
  r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = [
  ["尼罗河", "naïve"],
  ["你好", "，", "世界", "！", "我是", " Kimi", " K", "3", "。"],
  ["It's", " they're", " WE'LL", " I'd", " don'T", " o", "'clock"],
  ["123", "456", "7", ".", "5"],
  ["a", " ", " b", "\t", "\tc", "\n\n\n", "d", " \n", " ", " e", "   "],
  ["x", " =", " ", "10", "\r\n\r\n", "   ", " if", "):\n\n", "   ", " y"],
  ["get", "HTTPResponse", "Code", "_value", "(\n"],
  ["e\u0301a", "\t\u0301x", " 😀😀", " done", "!!\n\n", "«x", "»", " don", "’t"],
]
MIXED = st.text(
  st.sampled_from("尼河〇々aZǅßʰªא\u0301😀👍🏽'sStTlLdDmMrReEvV019Ⅷ½ \t\n\r\u00a0\u3000_(<|>.—"), max_size=24
)


def pieces_of(text):
  """The pieces that tiktoken itself makes: with every substring a token, each piece is one token."""
  raw = text.encode()
  substrings = {raw[i:j] for i in range(len(raw)) for j in range(i + 2, len(raw) + 1)}
  ranks = {token: rank for rank, token in enumerate([*BYTES, *sorted(substrings)])}
  tokenizer = KimiTokenizer(ranks, SpecialTokens({}, frozenset(), frozenset()))
  return [tokenizer.decode_bytes([token]).decode() for token in tokenizer.encode(text)]


@pytest.mark.parametrize("pieces", SPLITS, ids=repr)
def test_the_pattern_splits_as_published(pieces):
  assert pieces_of("".join(pieces)) == pieces


@given(text=MIXED)
@example(text="don'ſ 'Lls")
@settings(max_examples=60, deadline=None)
def test_set_intersection_equals_look_aheads(text):
  want = LOOK_AHEAD.findall(text)
  assert pieces_of(text) == want
  assert list(count_pieces([text])) == list(dict.fromkeys(piece.encode() for piece in want))


@given(text=st.text(max_size=60) | MIXED)
@settings(max_examples=100, deadline=None)
def test_text_survives_the_round_trip_in_ordinary_ids(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert max(ids, default=0) < 320


@pytest.mark.parametrize(
  "name", ["<|open|>tools<|sep|>", "[EOS]", "<|end_of_msg|>", "<|reserved_token_328|>"]
)
def test_user_text_never_becomes_a_special_token(tokenizer, name):
  ids = tokenizer.encode(name)
  assert tokenizer.decode(ids) == name
  assert not {token for token in ids if token >= 320}


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer):
  assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_specials_have_the_published_offsets(tokenizer):
  names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[UNK]", "[PAD]"]
  assert [tokenizer.special_id(name) - 320 for name in names] == [0, 1, 2, 3, 4, 5, 254, 255]
  assert tokenizer.special_id("<|reserved_token_328|>") == 328
  assert tokenizer.vocab_size == 576
  assert tokenizer.stop_ids == {321, 322}
  with pytest.raises(InputError, match=r"unknown, did you mean '<\|open\|>'\?"):
    tokenizer.special_id("<|opn|>")


def test_skipping_specials_keeps_the_markers_of_the_parser(tokenizer):
  specials = ["[BOS]", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|reserved_token_328|>"]
  ids = tokenizer.encode("hi") + [tokenizer.special_id(name) for name in specials]
  assert tokenizer.decode(ids) == "hi" + "".join(specials)
  assert tokenizer.decode(ids, skip_special=True) == "hi<|open|><|close|><|sep|>"


@pytest.mark.parametrize("token", [-1, 576])
def test_a_foreign_id_is_refused(tokenizer, token):
  with pytest.raises(InputError, match=f"token id {token}: outside the vocabulary, expected 0 to 575"):
    tokenizer.decode([5, token])


def test_a_vocabulary_of_another_size_is_refused(directory):
  with pytest.raises(
    CheckpointError, match="wrong vocabulary, expected 163840 ids as the model has, got 576"
  ):
    KimiTokenizer.from_directory(directory, vocab_size=163840)


def test_long_text_is_cut_where_the_published_tokenizer_cuts():
  assert [len(piece) for piece in kimi.cut("word " * 100_000)] == [400_000, 100_000]
  assert [len(piece) for piece in kimi.cut("a " + "b" * 60_000 + " " * 25_001 + "c")] == [
    25_002,
    25_000,
    35_000,
    2,
  ]
  assert [len(piece) for piece in kimi.cut(" " * 25_000 + "b" * 25_000)] == [50_000]
  assert list(kimi.cut("")) == []


@pytest.mark.parametrize("unit", [" ", "a", "!", "尼", "\u0301", "\n ", "aA"])
def test_endless_runs_do_not_overflow(tokenizer, unit):
  text = unit * (300_000 // len(unit))
  assert tokenizer.decode(tokenizer.encode(text)) == text
