"""Kimi K3 and Kimi-Linear in JAX.

    import MaxText
    model = MaxText.from_pretrained("DIR")
    model.logits([5, 7, 9])                      # float32 [3, vocabulary]
    model.generate(["def main("], max_new_tokens=32)[0].text

Importing this package imports nothing else; the functions import what they need.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from pathlib import Path

  from MaxText.inference.model import Model

__all__ = ["from_pretrained"]


def from_pretrained(directory: "str | Path", dtype: str = "float32", **overrides: Any) -> "Model":
  """Loads a model from a checkpoint directory in the published layout.

  Args:
    directory: holds config.json, safetensors, and the vocabulary if the model takes text.
    dtype: "float32" or "bfloat16": what activations are computed in and, unless `weight_dtype` says
      otherwise, what matrices are kept in.
    **overrides: any other key of the configuration, e.g. `expert_weights="dequantized"`.

  Returns:
    a model with `logits(ids)`, `generate(prompts, ...)`, `config` and `tokenizer`.

  Raises:
    CheckpointError: the checkpoint is damaged or incomplete.
    ConfigError: its configuration, or an override, cannot be used.
    InputError: the model does not fit this machine.
  """
  from MaxText.inference.model import from_pretrained as load

  return load(directory, dtype, **overrides)
