"""Which tokenizer a checkpoint directory has."""

from pathlib import Path

from MaxText.common.errors import CheckpointError
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.vocabulary import VOCABULARY_FILE


def has_tokenizer(directory: Path) -> bool:
  """Whether the directory holds a vocabulary; without one a model takes and gives token ids only."""
  return (Path(directory) / VOCABULARY_FILE).is_file()


def load_tokenizer(directory: Path, vocab_size: int) -> KimiTokenizer:
  """Loads the tokenizer beside a model's weights.

  Args:
    directory: published checkpoint directory.
    vocab_size: ids of the model.

  Raises:
    CheckpointError: the directory has no vocabulary, a damaged one, or one of another size.
  """
  if not has_tokenizer(directory):
    raise CheckpointError(
      f"{directory}: no {VOCABULARY_FILE}, so there is no text; give token ids with prompt_ids="
    )
  return KimiTokenizer.from_directory(directory, vocab_size)
