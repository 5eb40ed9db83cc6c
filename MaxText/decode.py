"""`python -m MaxText.decode CONFIG key=value ...`: continues prompts with a Kimi model.

Answers go to stdout, as text or as JSON; everything else goes to stderr. A user's mistake is one line on
stderr and exit status 2. Nothing heavy is imported before the configuration is known to fit this machine.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from MaxText.common.errors import InputError
from MaxText.configs import command_line
from MaxText.configs.options import DecodeOptions
from MaxText.configs.schema import Config
from MaxText.inference.compile_cache import compile_compactly, keep_programs

if TYPE_CHECKING:
  from MaxText.inference.model import Model
  from MaxText.inference.prompts import Prompt, Request, Settings

USAGE = "usage: python -m MaxText.decode CONFIG key=value ...   (--help lists the keys)"
HELP = """usage: python -m MaxText.decode CONFIG key=value ...

Continues prompts with a Kimi K3 or Kimi-Linear model.

CONFIG is a model name ({models}), a .yml file, a path inside the package
(configs/models/kimi-k3.yml), or a checkpoint directory with its own config.json.

examples:
  python -m MaxText.decode kimi-k3-tiny prompt="def main("
  python -m MaxText.decode kimi-k3-tiny prompt="import " temperature=0.8 top_p=0.95 seed=7 max_new_tokens=200
  python -m MaxText.decode DIR prompt_ids=5,7,9 stop_ids=1,2 output=json
  python -m MaxText.decode kimi-linear-48b-a3b checkpoint=DIR prompts_file=prompts.txt dtype=bfloat16

Answers go to stdout: streamed text for one prompt (behind the prompt itself on a terminal), a heading and
a text for each of several, or with output=json one object a line with prompt_ids, token_ids, text,
finish_reason (stop | length) and stats. A stop token is the last of token_ids and no part of text.
Messages, progress and the summary line go to stderr. Exit status: 0, or 2 for a mistake in what was given.

Compiled programs are kept below ~/.cache/maxtext-kimi-k3, or in JAX_COMPILATION_CACHE_DIR, and start at
once the next time.

A line of prompts_file is a prompt; in a .jsonl file it is a string, an array of token ids, or an object
with prompt or prompt_ids.

keys and their defaults:"""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  return command_line.run(arguments, USAGE, HELP, DecodeOptions, decode)


def decode(config: str, cfg: Config, options: DecodeOptions) -> None:
  """Answers the prompts of `options` on stdout.

  Args:
    config: what the user named as configuration.
    cfg: the model.
    options: the keys of this command.

  Raises:
    UserError: something given cannot be served. What is known before the model runs leaves stdout empty; a
      logit that is not finite ends an answer whose first text may already stand there.
  """
  from MaxText.inference import memory

  devices = 1 if options.mesh is None else None
  memory.check_fits(cfg, devices=devices)  # before the slow imports: a model of terabytes is refused at once
  from MaxText.inference.prompts import Settings

  prompts = _prompts(options)
  settings = Settings(
    max_new_tokens=options.max_new_tokens,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    seed=options.seed,
    stop_ids=options.stop_ids,
  )
  settings.check(cfg.vocab_size)
  from MaxText.inference.model import prepare
  from MaxText.inference.weights import RANDOM

  model, requests = prepare(config, cfg, options, prompts, settings)
  if model.weights.startswith(RANDOM):
    print(f"WARNING: {model.weights}: the answer means nothing", file=sys.stderr)
  write = _write_json if options.output == "json" else _write_text
  completions = write(model, requests, settings)
  print(completions[0].stats.summary(), file=sys.stderr)


def _prompts(options: DecodeOptions) -> "Sequence[Prompt]":
  from MaxText.inference.prompts import read_prompts

  if options.prompts_file is not None:
    return read_prompts(Path(options.prompts_file))
  given = [value for value in (options.prompt, options.prompt_ids) if value is not None]
  if not given:
    raise InputError("no prompt: give prompt=TEXT, prompt_ids=5,7,9 or prompts_file=FILE")
  return given


def _write_json(model: "Model", requests: "Sequence[Request]", settings: "Settings"):
  completions = model.answer(requests, settings)
  for completion in completions:
    print(json.dumps(completion.as_json(), ensure_ascii=False))
  sys.stdout.flush()
  return completions


def _write_text(model: "Model", requests: "Sequence[Request]", settings: "Settings"):
  """Streams the only answer, or writes each of several below a heading."""
  is_stream = len(requests) == 1 and model.tokenizer is not None
  if is_stream and sys.stdout.isatty():  # a reader sees the whole text, a pipe gets the answer alone
    _print_text(0, model.tokenizer.decode(requests[0].ids))
  completions = model.answer(requests, settings, _print_text if is_stream else None)
  for number, completion in enumerate(completions, 1):
    if len(completions) > 1:
      print(f"=== {number} of {len(completions)}")
    if not is_stream:
      ids = ",".join(map(str, completion.token_ids))
      print(ids if completion.text is None else completion.text, end="")
    print(flush=True)
  return completions


def _print_text(_: int, text: str) -> None:
  print(text, end="", flush=True)


if __name__ == "__main__":
  keep_programs(os.environ)
  compile_compactly(os.environ)
  sys.exit(main())
