"""`python -m MaxText.sft CONFIG key=value ...`: fine-tunes a Kimi model on conversations.

The trainer is that of `MaxText.train`; what differs is the data: chats in the model's own format. The loss
counts the assistant's tokens only.
"""

import os
import sys
from collections.abc import Sequence

from MaxText.common import command
from MaxText.configs.options import SftOptions
from MaxText.inference.compile_cache import compile_compactly, keep_programs
from MaxText.train import train_command

USAGE = "usage: python -m MaxText.sft CONFIG key=value ...   (--help lists the keys)"
HELP = """usage: python -m MaxText.sft CONFIG key=value ...

Fine-tunes a Kimi K3 or Kimi-Linear model on conversations. Needs pip install "maxtext-kimi-k3[train]".

CONFIG is what decode takes: a model name ({models}), a .yml
file, a path inside the package, or a checkpoint directory with its own config.json, whose weights it starts
from. With a .yml file, checkpoint=DIR names them.

examples:
  python -m MaxText.sft MaxText/assets/kimi-k3-tiny grain_train_files=chats.jsonl steps=100
  python -m MaxText.sft kimi-k3-tiny checkpoint=RUN grain_train_files='chats/*.jsonl' num_epoch=3

A line of grain_train_files is a JSON object with "messages" and, if there are any, "tools", as OpenAI's
fine-tuning takes them. Chats are rendered as serving renders them. The loss counts exactly what the assistant
generates: thoughts, answer, tool calls, and the markers that close them; an assistant message of "weight" 0
is context only. Chats are packed whole into rows of max_target_length tokens; none sees another one, and one
that is longer is refused with its line and length.

Everything else is as in MaxText.train: run_name goes on where a run ended, decode and convert read a run.

Exit status: 0, or 2 for a mistake in what was given.

keys and their defaults:"""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  return command.run(lambda given: train_command(given, USAGE, HELP, SftOptions), arguments)


if __name__ == "__main__":
  keep_programs(os.environ)
  compile_compactly(os.environ)
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  sys.exit(main())
