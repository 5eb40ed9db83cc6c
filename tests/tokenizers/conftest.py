"""A small vocabulary made in the test run itself."""

import pytest

from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.training import count_pieces, train_ranks
from MaxText.tokenizers.vocabulary import write_vocabulary

TEXT = (
  """
def main(argv):
  # don't stop: they've said I'll see 12345 things in 尼罗河, naïve café 😀😀
  for i in range(10):
    print("the Nile is a river, the longest one; The RIVER", argv[i])
  return None
"""
  * 3
)


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
  path = tmp_path_factory.mktemp("vocabulary")
  write_vocabulary(path, train_ranks(count_pieces([TEXT]), 320))
  return path


@pytest.fixture(scope="session")
def tokenizer(directory):
  return KimiTokenizer.from_directory(directory)
