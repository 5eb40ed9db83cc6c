"""The trainer against its slow twin, and the vocabulary that ships with the tiny model."""

from collections import Counter
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.common.errors import InputError
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.training import BYTES, main, standard_library, train_ranks
from MaxText.tokenizers.vocabulary import SpecialTokens


def slow_train_ranks(pieces, size):
  """Tokenizes everything anew with tiktoken for each rank."""
  tokens = list(BYTES)
  while len(tokens) < size:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = KimiTokenizer(ranks, SpecialTokens({}, frozenset(), frozenset()))
    pairs = Counter()
    for piece, count in pieces.items():
      word = [tokens[token] for token in tokenizer.encode(piece.decode())]
      for left, right in zip(word, word[1:]):
        pairs[left + right] += count
    tokens.append(min(pairs, key=lambda pair: (-pairs[pair], pair)))
  return {token: rank for rank, token in enumerate(tokens)}


@given(words=st.lists(st.text("abc", min_size=1, max_size=12), min_size=4, max_size=12))
@settings(max_examples=20, deadline=None)
def test_training_equals_counting_anew_for_each_rank(words):
  pieces = {
    word.encode(): count for count, word in enumerate(dict.fromkeys(["abcabc", "cab", *words]), start=1)
  }
  assert train_ranks(pieces, 259) == slow_train_ranks(pieces, 259)


def test_the_most_frequent_pair_comes_first():
  ranks = train_ranks({b"ab": 2, b"bc": 3, b"abc": 2}, 259)
  assert [token for token, rank in ranks.items() if rank >= 256] == [b"bc", b"ab", b"abc"]


@pytest.mark.parametrize(
  "size, message", [(300, "text too small .* it gives 257"), (255, "expected 256 or more")]
)
def test_an_impossible_size_is_refused(size, message):
  with pytest.raises(InputError, match=message):
    train_ranks({b"ab": 1}, size)


def test_an_impossible_size_is_one_line_and_status_2(tmp_path, capsys):
  assert main([str(tmp_path / "new"), "--vocab_size", "300"]) == 2
  out, err = capsys.readouterr()
  assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, []) and "too small" in err


def test_the_tiny_model_has_a_vocabulary_of_the_published_scheme():
  tokenizer = KimiTokenizer.from_directory(
    resources.files("MaxText") / "assets" / "kimi-k3-tiny", vocab_size=1024
  )
  assert tokenizer.stop_ids == {769, 770}
  assert [tokenizer.special_id(name) for name in ("[BOS]", "<|media_pad|>", "[PAD]")] == [768, 789, 1023]
  _, held_out = standard_library()
  text = max(held_out, key=len)
  assert len(text.encode()) / len(tokenizer.encode(text)) > 2.4
