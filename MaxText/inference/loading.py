"""A model made ready to serve: its weights in an engine, its tokenizer, and what ends its answers."""

import sys
from typing import NamedTuple

from MaxText.common.errors import InputError
from MaxText.configs.schema import Config
from MaxText.inference import weights
from MaxText.inference.engine import Engine
from MaxText.inference.model import default_stop_ids
from MaxText.models.sharding import Layout, describe_layout
from MaxText.tokenizers.kimi import KimiTokenizer


class Loaded(NamedTuple):
  """What a server answers with.

  Attributes:
    engine: holds the weights; nothing is compiled yet.
    tokenizer: of the model.
    stop_ids: ids that end an answer.
  """

  engine: Engine
  tokenizer: KimiTokenizer
  stop_ids: tuple[int, ...]


def load_engine(
  config: str, cfg: Config, checkpoint: str | None, seed: int, layout: Layout | None = None, **shape: int
) -> Loaded:
  """Finds the weights of a model and gives them to an engine; random weights are told on stderr.

  Args:
    config: what the user named as configuration.
    cfg: the model.
    checkpoint: what the user named as weights, or None.
    seed: of random weights.
    layout: of the devices that hold them, or None for one.
    **shape: of the engine, as `Engine` takes it.

  Raises:
    CheckpointError: the weights cannot be used.
    InputError: the model has no tokenizer.
  """
  source = weights.find(cfg, checkpoint, config)
  tokenizer = weights.read_tokenizer(cfg, source)
  if tokenizer is None:
    raise InputError(f"{config}: serving needs a tokenizer (tiktoken.model beside the weights)")
  decoder, words = weights.read_decoder(cfg, source, seed, layout=layout)
  if layout is not None:
    print(describe_layout(layout, decoder), file=sys.stderr)
  if words.startswith(weights.RANDOM):
    print(f"WARNING: {words}: the answers mean nothing", file=sys.stderr)
  return Loaded(Engine(decoder, **shape), tokenizer, default_stop_ids(cfg, tokenizer))
