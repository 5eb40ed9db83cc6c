"""What lies in a checkpoint directory beside the weights: its kind, configuration, tokenizer files."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from MaxText.checkpoints.reader import is_published, open_published, read_json
from MaxText.common.errors import CheckpointError
from MaxText.common.steps import whole_steps
from MaxText.configs.published import from_published, to_published
from MaxText.configs.schema import Config

ORBAX_FILE = "orbax_checkpoint.json"  # written last, so its presence says that the checkpoint is whole
ORBAX_FORMAT = 1
_ORBAX_LAYOUT = {"scan_layers", "expert_weights", "dtype", "weight_dtype"}
# keys that say which adapters a checkpoint of a fine-tuning run holds beside its weights
LORA_KEYS = ("lora_rank", "lora_alpha", "lora_targets", "lora_experts")
# whether the plain experts of a checkpoint count as rounded to MXFP4; old ones do not say
ROUNDED_KEY = "mxfp4_qat"
RUN_FILE = "run.json"  # beside config.json in the directory of a training run
RUN_STEPS = "checkpoints"  # one folder a step below it
RUN_PREFIXES = ("params.params.decoder.", "nnx_aux.model.decoder.")  # weights in a checkpoint of maxtext
COMPANIONS = (
  "tiktoken.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "tokenizer.json",
  "chat_template.jinja",
  "generation_config.json",
  "preprocessor_config.json",
)


def kind(directory: str | Path) -> Literal["published", "orbax"] | None:
  """Says which sort of checkpoint `directory` is, or None when it is no whole checkpoint."""
  if (Path(directory) / ORBAX_FILE).is_file() or run_checkpoint(Path(directory)):
    return "orbax"
  return "published" if is_published(Path(directory)) else None


def run_checkpoint(directory: Path) -> tuple[Path, Path] | None:
  """Returns the directory of a training run and the arrays of one of its checkpoints.

  Args:
    directory: the run, whose last whole checkpoint is taken, or one checkpoint, RUN/checkpoints/STEP.

  Returns:
    None where neither is meant, or the run has no whole checkpoint.
  """
  home, step = directory, None
  if directory.parent.name == RUN_STEPS:
    home, step = directory.parent.parent, directory
  if not (home / RUN_FILE).is_file():
    return None
  steps = [home / RUN_STEPS / str(number) for number in whole_steps(home / RUN_STEPS)]
  if step is None and steps:
    step = steps[-1]
  return (home, step / "items") if step in steps else None


def home(directory: str | Path) -> Path:
  """Returns where configuration and tokenizer of a checkpoint lie: in it, or in the run that it is of."""
  run = run_checkpoint(Path(directory))
  return run[0] if run else Path(directory)


def write_orbax_file(directory: Path, name: str, cfg: Config, manifest: dict[str, Any] | None = None) -> None:
  """Writes how the tree of `cfg` is laid out: scanned or not, experts packed, rounded or neither, dtypes."""
  layout = {"scan_layers": cfg.scan_layers, "expert_weights": cfg.expert_weights}
  layout |= {"dtype": cfg.dtype, "weight_dtype": cfg.parameter_dtype}
  layout[ROUNDED_KEY] = cfg.mxfp4_qat and not cfg.packs_experts
  if cfg.lora_rank:
    layout |= {key: getattr(cfg, key) for key in LORA_KEYS}
  about = {"format": ORBAX_FORMAT, "layout": layout, "manifest": manifest}
  (directory / name).write_text(json.dumps(about) + "\n", encoding="utf-8")


def stored_dtype(directory: str | Path) -> Literal["float32", "bfloat16"]:
  """Returns the narrowest type that holds the matrices and norms of a checkpoint without rounding.

  Raises:
    CheckpointError: no checkpoint there, or an unreadable one.
  """
  if kind(directory) == "orbax":
    return stored_layout(directory)["weight_dtype"]
  wide = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
  entries = open_published(directory).entries.values()
  matrices = {entry.dtype for entry in entries if not entry.name.endswith(wide)} - {"U8"}
  return "bfloat16" if matrices == {"BF16"} else "float32"


def stored_layout(directory: str | Path) -> dict[str, Any]:
  """Returns how the tree of an Orbax checkpoint, or of a training run, is laid out.

  Raises:
    CheckpointError: unreadable, of another format, or incomplete.
  """
  run = run_checkpoint(Path(directory))
  about = read_orbax_file(run[0], RUN_FILE) if run else read_orbax_file(Path(directory))
  return about["layout"]


def read_orbax_file(directory: Path, name: str = ORBAX_FILE) -> dict[str, Any]:
  """Returns what the file beside a checkpoint's arrays says: `layout`, and `manifest` or None.

  Raises:
    CheckpointError: unreadable, of another format, or incomplete.
  """
  path = directory / name
  about = read_json(path)
  written = about.get("format") if isinstance(about, dict) else None
  if written != ORBAX_FORMAT:
    raise CheckpointError(f"{path}: format {written}, expected {ORBAX_FORMAT}")
  layout = about.get("layout")
  optional = {*LORA_KEYS, ROUNDED_KEY}
  if not isinstance(layout, dict) or layout.keys() - optional != _ORBAX_LAYOUT or "manifest" not in about:
    raise CheckpointError(f"{path}: expected manifest, and layout with {', '.join(sorted(_ORBAX_LAYOUT))}")
  return about


def write_companions(directory: Path, cfg: Config, source: str | Path | None) -> None:
  """Writes `config.json` into `directory` and copies the small files that a checkpoint is used with.

  Args:
    directory: of the new checkpoint.
    cfg: written in the published form; where the source states the same, its file is copied as it stands.
    source: where tokenizer and generation files are taken from, as far as they are there; None for nowhere.
  """
  text = json.dumps(to_published(cfg), indent=2, ensure_ascii=False)
  (directory / "config.json").write_text(text + "\n", encoding="utf-8")
  if source is None:
    return
  own = Path(source) / "config.json"
  if own.is_file() and to_published(from_published(read_json(own), str(own))) == to_published(cfg):
    shutil.copyfile(own, directory / "config.json")
  for name in COMPANIONS:
    if (path := Path(source) / name).is_file():
      shutil.copyfile(path, directory / name)
