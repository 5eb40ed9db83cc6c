"""Where two configurations state another architecture."""

from typing import Any

from MaxText.configs.schema import Config

# what a checkpoint and the configuration it is read with may state differently without a weight changing its
# meaning
_FREE = {"model_name", "max_position_embeddings", "initializer_range"}
_FREE |= {"expert_quantization", "bos_token_id", "eos_token_id", "pad_token_id"}


def architecture_differences(stored: Config, cfg: Config) -> list[tuple[str, Any, Any]]:
  """Returns (key, value in `stored`, value in `cfg`) of each architecture key that differs."""
  required = (key for key, field in Config.model_fields.items() if field.is_required())
  pairs = ((key, getattr(stored, key), getattr(cfg, key)) for key in required if key not in _FREE)
  return [pair for pair in pairs if pair[1] != pair[2]]
