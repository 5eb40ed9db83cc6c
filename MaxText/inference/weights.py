"""Finds the weights and the tokenizer of a model: a checkpoint, the package's own, or random numbers."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from MaxText.checkpoints import load
from MaxText.checkpoints.adapters import load_adapters
from MaxText.checkpoints.directory import RUN_FILE, home, kind
from MaxText.common.errors import CheckpointError
from MaxText.configs import loader
from MaxText.configs.comparison import architecture_differences
from MaxText.configs.schema import Config
from MaxText.models import registry
from MaxText.models.adapters import merged
from MaxText.models.sharding import Layout, parameter_shardings, place
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.registry import has_tokenizer, load_tokenizer

RANDOM = "random weights"
MOST_NAMED = 4  # differences that one message spells out
ASSETS = Path(__file__).parent.parent / "assets"


class Source(NamedTuple):
  """Where weights come from.

  Attributes:
    directory: a checkpoint, or None for random weights.
    note: why, where the user did not say.
  """

  directory: Path | None
  note: str = ""


def find(cfg: Config, checkpoint: str | None, config: str | None = None) -> Source:
  """Decides where the weights come from, reading no tensor.

  Args:
    cfg: the architecture.
    checkpoint: what the user named, or None.
    config: what the user named as configuration; a checkpoint directory serves as both.

  Returns:
    the named checkpoint; else the directory that the configuration lies in, if it holds weights; else the
    package's own checkpoint of that model, if it fits; else random weights.

  Raises:
    CheckpointError: the named checkpoint does not exist or is of another architecture.
  """
  if checkpoint is not None:
    directory = Path(checkpoint)
    if not directory.is_dir():
      raise CheckpointError(f"checkpoint: {checkpoint}: no such directory")
    if kind(directory) is None:
      raise CheckpointError(f"checkpoint: {checkpoint}: holds no whole checkpoint, published or Orbax")
    return Source(_same_architecture(cfg, directory, f"checkpoint: {checkpoint}"))
  if config is not None and (file := loader.find(config)).name == "config.json":
    directory = Path(config) if Path(config).is_dir() else file.parent  # of a training run, one checkpoint
    if kind(directory):
      return Source(_same_architecture(cfg, directory, config))
    if (file.parent / RUN_FILE).is_file():
      raise CheckpointError(f"{config}: no whole checkpoint of this training run")
  bundled = ASSETS / cfg.model_name
  if kind(bundled) is None:
    return Source(None, "no checkpoint= was given")
  if differing := differences(cfg, bundled):
    return Source(None, f"the package's {cfg.model_name} has another architecture: {differing}")
  return Source(bundled)


def _same_architecture(cfg: Config, directory: Path, name: str) -> Path:
  """Returns `directory`, a checkpoint that messages call `name`, unless `cfg` states another architecture."""
  if differing := differences(cfg, directory):
    raise CheckpointError(f"{name}: another architecture than the configuration: {differing}")
  return directory


def differences(cfg: Config, directory: Path) -> str:
  """Says where `cfg` and a checkpoint's own config.json state another architecture; empty where nowhere."""
  stored = home(directory) / "config.json"
  if not stored.is_file():
    return ""
  own = loader.load(stored)
  named = [f"{key} {theirs} there, {ours} here" for key, theirs, ours in architecture_differences(own, cfg)]
  more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
  return "; ".join(named[:MOST_NAMED]) + more


def read_tokenizer(cfg: Config, source: Source) -> KimiTokenizer | None:
  """Returns the tokenizer beside the weights, or None where there is none.

  Random weights of a model that comes with the package take its tokenizer, unless they count other ids.

  Raises:
    CheckpointError: the vocabulary is damaged, or of another size than the model's.
  """
  directory = ASSETS / cfg.model_name if source.directory is None else home(source.directory)
  if not has_tokenizer(directory):
    return None
  if source.directory is None and loader.load(directory).vocab_size != cfg.vocab_size:
    return None
  return load_tokenizer(directory, cfg.vocab_size)


def read_decoder(
  cfg: Config,
  source: Source,
  seed: int = 0,
  adapters: str | None = None,
  layout: Layout | None = None,
) -> tuple[nnx.Module, str]:
  """Returns the decoder with its weights, and in words where they came from.

  Args:
    cfg: the architecture and the dtypes to hold.
    source: from `find`.
    seed: of random weights.
    adapters: file of low-rank adapters; they are folded into the weights, those of packed experts apart.
    layout: of the devices that hold them, or None for one.

  Raises:
    CheckpointError: the checkpoint, or the adapter file, is damaged or does not fit.
  """
  if source.directory is None:
    decoder = place(registry.build(cfg, nnx.Rngs(seed)), layout)
    words = f"{RANDOM}, seed {seed} ({source.note})"
  else:
    shardings = None if layout is None else partial(parameter_shardings, layout)
    decoder = load.load(source.directory, cfg, mesh_shardings=shardings).model
    decoder.layout = layout
    words = str(source.directory)
  if adapters is None:
    return decoder, words
  load_adapters(decoder, adapters)
  return place(merged(decoder, keep_on_packed=True), layout), f"{words} with {adapters}"
