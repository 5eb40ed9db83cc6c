"""A small vocabulary with the special tokens of Kimi-Linear."""

import pytest

from MaxText.tokenizers.chat.kimi_k2_render import MARKERS
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.training import BYTES
from MaxText.tokenizers.vocabulary import SpecialTokens


@pytest.fixture(scope="session")
def linear_tokenizer():
  names = ["[BOS]", "[EOS]", *MARKERS, "[EOT]", "[PAD]"]
  ids = {name: len(BYTES) + i for i, name in enumerate(names)}
  markers = frozenset(ids[name] for name in MARKERS if "tool" in name)
  ranks = {token: rank for rank, token in enumerate(BYTES)}
  return KimiTokenizer(ranks, SpecialTokens(ids, markers, frozenset([ids["[EOS]"], ids["<|im_end|>"]])))
