"""`python -m MaxText.convert SRC DST key=value ...`: checkpoints and configurations, from form to form.

A published directory becomes an Orbax checkpoint and the other way; a config.json becomes a model file and
the other way. The destination appears whole or not at all. A user's mistake is one line on stderr and exit
status 2.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from MaxText.common import command
from MaxText.common.errors import CheckpointError, InputError
from MaxText.configs import loader
from MaxText.configs.command_line import documented_keys
from MaxText.configs.options import ConvertOptions
from MaxText.configs.published import to_published, write_model_file
from MaxText.configs.schema import Config

if TYPE_CHECKING:
  from MaxText.checkpoints.report import Loaded

USAGE = "usage: python -m MaxText.convert SRC DST key=value ...   (--help says more)"
HELP = """usage: python -m MaxText.convert SRC DST key=value ...

  SRC                          DST
  published directory          Orbax checkpoint (a new directory)
  Orbax checkpoint             published directory (config.json and safetensors)
  training run                 the same, of its last checkpoint or of RUN/checkpoints/STEP
  config.json or any SRC       model file, when DST ends in .yml
  model file or any SRC        config.json, when DST ends in .json

Every tensor of SRC is used once, or listed as skipped (vision); anything left over or missing stops the
conversion. Stored types are kept: a bfloat16 checkpoint stays bfloat16, packed experts stay packed. A
published directory that went through Orbax comes back with the bytes that it had. Tokenizer files are copied.
A run's experts are packed where its model has MXFP4 experts; expert_quantization=none exports plain ones.

examples:
  python -m MaxText.convert ~/Kimi-Linear-48B-A3B-Instruct ~/kimi-linear-orbax scan_layers=true
  python -m MaxText.convert ~/kimi-linear-orbax ~/exported
  python -m MaxText.convert runs/mine ~/mine
  python -m MaxText.convert runs/mine ~/mine-plain expert_quantization=none
  python -m MaxText.convert ~/Kimi-K3/config.json my-k3.yml

Byte totals go to stderr. Exit status: 0, or 2 for a mistake in what was given; nothing half-written remains.

keys and their defaults:"""
# of the model's keys, those that change what is written
KEYS = ("scan_layers", "weight_dtype", "expert_weights")
ROUNDED_NOTE = "plain experts, rounded to MXFP4 on the way; expert_quantization=none keeps them as they are"


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  return command.run(_command, arguments)


def _command(arguments: list[str]) -> int:
  if {"-h", "--help", "help"} & set(arguments):
    print("\n".join(_help()))
    return 0
  if len(arguments) < 2 or any("=" in name for name in arguments[:2]):
    print(USAGE, file=sys.stderr)
    raise InputError("SRC and DST are missing; they come first")
  source, target, *overrides = arguments
  if not Path(source).exists() and os.sep in source:
    raise CheckpointError(f"{source}: no such file or directory")
  cfg, options = loader.load_command(source, overrides, ConvertOptions)
  if Path(target).suffix in (".yml", ".yaml", ".json"):
    _write_config(cfg, Path(target), options)
  elif not Path(source).is_dir():
    raise InputError(f"{target}: expected *.yml or *.json, because {source} holds no weights")
  else:
    asked = any(text.startswith("weight_dtype=") for text in overrides)
    _write_checkpoint(source, cfg if asked else _in_stored_dtype(cfg, source), Path(target), options, asked)
  return 0


def _write_config(cfg: Config, target: Path, options: ConvertOptions) -> None:
  if target.exists() and not options.overwrite:
    raise InputError(f"{target}: exists; give overwrite=true to replace it")
  partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
  try:
    if target.suffix == ".json":
      partial.write_text(json.dumps(to_published(cfg), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
      write_model_file(cfg, partial)
    partial.replace(target)
  except OSError as error:
    raise InputError(f"{target}: cannot be written: {error}") from error
  finally:
    partial.unlink(missing_ok=True)
  print(f"{target}: {cfg.model_name}", file=sys.stderr)


def _in_stored_dtype(cfg: Config, source: str) -> Config:
  """Holds weights in the type that they are stored in."""
  from MaxText.checkpoints.directory import stored_dtype

  return cfg.model_copy(update={"weight_dtype": stored_dtype(source)})


def _write_checkpoint(source: str, cfg: Config, target: Path, options: ConvertOptions, casts: bool) -> None:
  """Reads `source` and writes the other form; `casts` writes matrices in cfg's type, not the stored one."""
  from MaxText.checkpoints.adapters import load_adapters
  from MaxText.checkpoints.directory import home, kind
  from MaxText.checkpoints.load import load
  from MaxText.checkpoints.orbax_io import save_orbax
  from MaxText.checkpoints.staging import check_writable
  from MaxText.checkpoints.write import save_published
  from MaxText.inference.memory import check_fits

  check_fits(cfg)
  if target.resolve() == Path(source).resolve():
    raise InputError(f"{target}: is the source itself")
  if target.resolve() in Path(source).resolve().parents:
    raise InputError(f"{target}: holds the source, which replacing it would delete")
  check_writable(target, options.overwrite)  # before hours of reading
  loaded: Loaded = load(source, cfg)
  print(loaded.report, file=sys.stderr)
  if options.adapters is not None:
    load_adapters(loaded.model, options.adapters)  # either writer folds them into the weights
  if kind(source) == "published" and options.adapters is None:
    save_orbax(loaded.model, target, manifest=loaded.manifest, companions=source, overwrite=options.overwrite)
  else:
    if _rounds(loaded, source):
      print(f"{source}: {ROUNDED_NOTE}", file=sys.stderr)
    save_published(
      loaded.model,
      loaded.model.cfg,
      target,
      manifest=loaded.manifest,
      companions=home(source),
      weight_dtype=cfg.parameter_dtype if casts else None,
      overwrite=options.overwrite,
      max_shard_bytes=options.max_shard_bytes,
    )
  print(f"{target}: written, {kind(target)}", file=sys.stderr)


def _rounds(loaded: "Loaded", source: str) -> bool:
  """Whether the published form rounds experts to MXFP4 that were used as plain numbers, or with adapters."""
  from MaxText.checkpoints.directory import ROUNDED_KEY, kind, stored_layout
  from MaxText.checkpoints.layout import ParameterTree
  from MaxText.models.adapters import adapts_experts

  cfg = loaded.model.cfg
  if cfg.expert_quantization != "mxfp4" or cfg.packs_experts:
    return False
  if adapts_experts(ParameterTree(loaded.model).values):
    return True
  if kind(source) == "published" or loaded.manifest is not None:
    return False  # as they were published
  return not stored_layout(source).get(ROUNDED_KEY, False)


def _help() -> Iterator[str]:
  """Yields the lines of --help; defaults and meanings are those of base.yml."""
  yield HELP
  for each in documented_keys({*ConvertOptions.model_fields, *KEYS}):
    yield f"  {f'{each.key}={each.default}':<30} {each.meaning}"


if __name__ == "__main__":
  sys.exit(main())
