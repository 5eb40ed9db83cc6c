"""What a checkpoint directory offers."""

import pytest

from MaxText.common.errors import CheckpointError
from MaxText.tokenizers.registry import has_tokenizer, load_tokenizer


def test_the_vocabulary_beside_the_weights_is_loaded(directory):
  assert has_tokenizer(directory)
  assert load_tokenizer(directory, 576).vocab_size == 576


def test_a_directory_without_vocabulary_takes_ids_only(tmp_path):
  assert not has_tokenizer(tmp_path)
  with pytest.raises(
    CheckpointError, match=r"no tiktoken\.model, so there is no text; give token ids with prompt_ids="
  ):
    load_tokenizer(tmp_path, 576)
