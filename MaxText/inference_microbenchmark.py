"""`python -m MaxText.inference_microbenchmark CONFIG key=value ...`: times what serving is made of.

The results go to stdout as JSON, under the names of maxtext's own benchmark; everything else goes to stderr.
A user's mistake is one line on stderr and exit status 2, before anything is measured where it shows by then;
what was measured before a later failure is printed all the same.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from MaxText.common.errors import InputError
from MaxText.configs import command_line
from MaxText.configs.options import MicrobenchmarkOptions
from MaxText.configs.schema import Config
from MaxText.inference.compile_cache import compile_compactly

if TYPE_CHECKING:
  from MaxText.inference.microbenchmark import Microbenchmark
  from MaxText.inference.microbenchmark_extent import Extent

USAGE = "usage: python -m MaxText.inference_microbenchmark CONFIG key=value ...   (--help lists the keys)"
HELP = """usage: python -m MaxText.inference_microbenchmark CONFIG key=value ...

Times prompts, insertion, decoding and whole requests of a Kimi K3 or Kimi-Linear model on this machine.

CONFIG is a model name ({models}), a .yml file, a path inside the package
(configs/models/kimi-k3.yml), or a checkpoint directory with its own config.json. Without weights they are
random; prompts always are.

examples:
  python -m MaxText.inference_microbenchmark kimi-k3-tiny
  python -m MaxText.inference_microbenchmark DIR slots=16 inference_microbenchmark_log_file_path=results.json
  python -m MaxText.inference_microbenchmark DIR inference_microbenchmark_stages=sweep \\
    inference_microbenchmark_context_lengths=1024,8192,65536 inference_microbenchmark_plot_path=sweep.png

stages: prefill (prompts and, as in maxtext, insert), insert (alone), prefill-multisampling (several answers
to one prompt), generate (steps of all slots), sweep (steps over batch sizes and contexts), end-to-end
(requests through the scheduler). slots is the batch, per_device_batch_size in maxtext.

The results go to stdout as JSON, and to inference_microbenchmark_log_file_path. Each run compiles its
programs anew, and reports how long that took, unless JAX_COMPILATION_CACHE_DIR names where to keep them.
Exit status: 0, or 2 for a mistake in what was given.

keys and their defaults:"""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  return command_line.run(arguments, USAGE, HELP, MicrobenchmarkOptions, measure)


def measure(config: str, cfg: Config, options: MicrobenchmarkOptions) -> None:
  """Measures, and writes what came out to stdout and to the files that `options` names.

  Args:
    config: what the user named as configuration.
    cfg: the model.
    options: the keys of this command.

  Raises:
    UserError: something given cannot be measured, or no longer be written; stdout has what was measured.
  """
  from MaxText.inference import memory
  from MaxText.inference.microbenchmark_extent import attention_bytes, extent
  from MaxText.inference.microbenchmark_plot import check_plot, plot

  reach = extent(cfg, options)
  picture = options.inference_microbenchmark_plot_path
  log = options.inference_microbenchmark_log_file_path
  _check_writable("inference_microbenchmark_log_file_path", log)
  _check_writable("inference_microbenchmark_plot_path", picture)
  if picture is not None:
    check_plot(Path(picture))
  # before the slow imports: a model of terabytes is refused at once
  capacity = options.tokens_of_a_slot(reach.pages)
  memory.check_fits(cfg, options.slots, capacity, beside=attention_bytes(cfg, options))
  from MaxText.inference.model import check_drops_nothing

  check_drops_nothing(cfg)
  benchmark, words = load(config, cfg, options, reach)
  from MaxText.inference.microbenchmark import summary

  results = run(benchmark, words)
  print("\n".join(summary(results)), file=sys.stderr)
  if log is not None:
    text = json.dumps(results, indent=2) + "\n"
    _write(
      "inference_microbenchmark_log_file_path", log, lambda path: path.write_text(text, encoding="utf-8")
    )
  if picture is not None:
    _write("inference_microbenchmark_plot_path", picture, lambda path: plot(results, path))


def run(benchmark: "Microbenchmark", weights: str) -> dict[str, Any]:
  """Runs all stages and prints the results; returns them.

  Args:
    benchmark: on its engine.
    weights: where they came from, in words.

  Raises:
    InputError: an answer broke off; what was measured before is printed.
  """
  try:
    benchmark.run()
  finally:  # neither a stage that fails nor an interrupt takes the stages before it along
    results = benchmark.report()
    results["environment"]["weights"] = weights
    print(json.dumps(results, indent=2), flush=True)
  return results


def load(
  config: str, cfg: Config, options: MicrobenchmarkOptions, reach: "Extent"
) -> "tuple[Microbenchmark, str]":
  """Returns the benchmark on an engine that holds the weights, and in words where they came from.

  Raises:
    CheckpointError: the weights cannot be used.
  """
  from flax import nnx

  from MaxText.inference import weights
  from MaxText.inference.engine import Engine
  from MaxText.inference.microbenchmark import Microbenchmark

  source = weights.find(cfg, options.checkpoint, config)
  decoder, words = weights.read_decoder(cfg, source, options.seed)
  engine = Engine(
    decoder,
    slots=options.slots,
    pages=reach.pages,
    page_size=options.page_size,
    max_target_length=reach.max_target_length,
    prefill_chunk=options.prefill_chunk,
    steps=options.steps_per_round,
  )
  return Microbenchmark(engine, cfg, options, reach, nnx.state(decoder)), words


def _check_writable(key: str, name: str | None) -> None:
  if name is None:
    return
  path = Path(name)
  if not path.parent.is_dir():
    raise InputError(f"{key}: {name}: no directory {path.parent}")
  if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
    raise InputError(f"{key}: {name}: cannot be written")


def _write(key: str, name: str, write: Callable[[Path], object]) -> None:
  try:
    write(Path(name))
  except OSError as failure:
    reason = failure.strerror or failure
    raise InputError(f"{key}: {name}: cannot be written ({reason}); the results are on stdout") from None


if __name__ == "__main__":
  compile_compactly(os.environ)
  sys.exit(main())
