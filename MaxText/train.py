"""`python -m MaxText.train CONFIG key=value ...`: trains a Kimi model with maxtext's own pre-training loop.

Progress and messages go to stderr, measurements to the run's metrics.jsonl. A user's mistake is one line on
stderr and exit status 2.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from MaxText.common import command
from MaxText.common.errors import ConfigError, InputError, did_you_mean
from MaxText.configs import loader
from MaxText.configs.command_line import config_and_keys, key_listing
from MaxText.configs.options import SftOptions, TrainOptions
from MaxText.configs.schema import Config
from MaxText.inference.compile_cache import compile_compactly, keep_programs

if TYPE_CHECKING:
  from MaxText.tokenizers.chat.formats import ChatFormat
  from MaxText.tokenizers.chat.options import ChatOptions
  from MaxText.tokenizers.kimi import KimiTokenizer

USAGE = "usage: python -m MaxText.train CONFIG key=value ...   (--help lists the keys)"
HELP = """usage: python -m MaxText.train CONFIG key=value ...

Trains a Kimi K3 or Kimi-Linear model with the pre-training loop of maxtext 0.2.5: its optimizers, sharding
and Orbax checkpoints, our decoder and data. Needs pip install "maxtext-kimi-k3[train]".

CONFIG is what decode takes: a model name ({models}), a .yml
file, a path inside the package, or a checkpoint directory with its own config.json. The same file decodes.

examples:
  python -m MaxText.train kimi-k3-tiny steps=20
  python -m MaxText.train kimi-k3-tiny run_name=mine steps=500 grain_train_files='books/**/*.txt'
  python -m MaxText.train kimi-k3-tiny run_name=mine steps=900 grain_train_files='books/**/*.txt'
  python -m MaxText.train kimi-k3-tiny opt_type=muon learning_rate=0.02 per_device_batch_size=8
  python -m MaxText.train kimi-k3-tiny checkpoint=MaxText/assets/kimi-k3-tiny learning_rate=1e-4

The third line goes on where the second ended: a run_name that has checkpoints continues at the token behind
the last one, with the same data in the same order. Without run_name each run is a new one.

A text file is one document; so is a line of .jsonl, a row of .parquet, a record of .array_record. Each is
closed by the model's end-of-text id. Documents are packed into rows: no token sees another document, and one
that is longer than a row goes on in the next.

The run's directory gets config.json, the tokenizer, metrics.jsonl (a line a step) and checkpoints/STEP. A
step whose loss is no number is undone and stops the run with the name of the first bad parameter.

Exit status: 0, or 2 for a mistake in what was given.

keys and their defaults:"""
WIDTH = 34  # of `key=default` in the help; maxtext's names are long
EPILOGUE = """
Every key of a model file may be given too, for example base_num_decoder_layers=4; and on the command line
maxtext's own keys for optimizers, schedules, checkpoints, meshes, profiling and metrics (adam_b1, muon_beta,
lr_schedule_type, dcn_data_parallelism, profiler, ...)."""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  return command.run(lambda given: train_command(given, USAGE, HELP, TrainOptions), arguments)


def train_command(arguments: list[str], usage: str, help_text: str, schema: type[TrainOptions]) -> int:
  """Reads the command line of a kind of training and runs it.

  Args:
    arguments: CONFIG and the keys.
    usage: one line, for a command without CONFIG.
    help_text: what stands before the list of keys.
    schema: keys of this kind of training.

  Raises:
    UserError: something given cannot be used.
  """
  given = config_and_keys(arguments, usage, lambda: _help(help_text, schema))
  if given is None:
    return 0
  config, overrides = given
  ours, others = _split(overrides)
  cfg, options = loader.load_command(config, ours, schema)
  from MaxText.training import compat

  compat.check_version()
  passed = _passed(others)
  _train(config, cfg, options, passed)
  return 0


def _train(config: str, cfg: Config, options: TrainOptions, passed: dict[str, Any]) -> None:
  from MaxText.checkpoints.directory import kind
  from MaxText.inference.memory import check_trains
  from MaxText.training import run

  check_trains(run.trained_config(cfg), run.MOMENTS[options.opt_type])
  if options.checkpoint is None and kind(config):  # a directory means its weights too
    options = options.model_copy(update={"checkpoint": config})
  if options.run_name is None:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    options = options.model_copy(update={"run_name": f"{cfg.model_name}-{stamp}"})
  tokenizer, companions = _tokenizer(config, cfg, options)
  chat = _chat(options, tokenizer) if isinstance(options, SftOptions) else None
  directory = run.train(cfg, options, passed, tokenizer, companions, chat)
  if options.enable_checkpointing:
    print(f"{directory}: trained; run_name={options.run_name} with more steps goes on", file=sys.stderr)


def _chat(options: SftOptions, tokenizer: "KimiTokenizer") -> "tuple[ChatFormat, ChatOptions]":
  """The model's chat format, which its vocabulary tells, and how conversations are rendered in it."""
  from MaxText.tokenizers.chat.formats import chat_format
  from MaxText.tokenizers.chat.options import ChatOptions

  chat = chat_format(tokenizer)
  thinking = options.thinking and chat.has_thinking
  return chat, ChatOptions(thinking=thinking, thinking_effort=options.thinking_effort if thinking else None)


def _tokenizer(config: str, cfg: Config, options: TrainOptions) -> "tuple[KimiTokenizer | None, Path | None]":
  """The tokenizer that was named, or the one beside the weights or the package's model; and its directory."""
  from MaxText.inference.weights import ASSETS
  from MaxText.tokenizers.registry import has_tokenizer, load_tokenizer

  if options.dataset_type == "synthetic":
    return None, None
  if options.tokenizer_path is not None:
    return load_tokenizer(Path(options.tokenizer_path), cfg.vocab_size), Path(options.tokenizer_path)
  candidates = [loader.find(config).parent, ASSETS / cfg.model_name]
  if options.checkpoint is not None:
    candidates.insert(0, Path(options.checkpoint))
  for directory in filter(has_tokenizer, candidates):
    return load_tokenizer(directory, cfg.vocab_size), directory
  raise InputError("tokenizer_path: needed, no tiktoken.model lies beside the configuration or the weights")


# --- keys ---------------------------------------------------------------------------------------------------


def _split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
  """Separates our keys, and what is no key=value, from keys that only maxtext may know."""
  known = {name for schema in (Config, *loader.COMMANDS) for name in schema.model_fields}
  others = [text for text in overrides if "=" in text and text.partition("=")[0] not in known]
  return [text for text in overrides if text not in others], others


def _passed(others: Sequence[str]) -> dict[str, Any]:
  """Reads maxtext's own keys; their values are checked by maxtext's schema."""
  from MaxText.training import compat

  passed, known = {}, compat.passed_keys()
  for text in others:
    key, _, value = text.partition("=")
    if key not in known:
      if key in compat.all_keys():
        raise ConfigError(f"command line: {key}: a key of maxtext that this decoder does not read")
      names = [*TrainOptions.model_fields, *Config.model_fields, *known]
      raise ConfigError(f"command line: {key}: unknown key{did_you_mean(key, names)}")
    if key in passed:
      raise ConfigError(f"command line: {key}: given twice")
    passed[key] = loader.foreign_value(key, value)
  return passed


def _help(text: str, schema: type[TrainOptions]) -> Iterator[str]:
  """Yields the lines of --help; keys, defaults and meanings are those of base.yml."""
  yield text.format(models=", ".join(loader.known_models()))
  yield from key_listing(schema.model_fields | Config.model_fields, WIDTH)
  yield EPILOGUE


if __name__ == "__main__":
  keep_programs(os.environ)
  compile_compactly(os.environ)
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  sys.exit(main())
