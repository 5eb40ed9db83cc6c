"""Our server against mlx-lm's own, over HTTP on one checkpoint: the same answers first, then the figures.

  python -m benchmarks.serving --quick

Starts both servers on the K3 checkpoint of `benchmarks.run`, checks that they count the same tokens in the
same prompts and answer with the same text, then lets 1, 4 and 8 clients ask each of them by turns; the other
one's process is stopped meanwhile. Clients ask for streamed greedy completions, one after the other. An
answer may end before its limit: rates are of the tokens that each side counts, and their sum is reported.
Only ratios within a run mean anything. A JSON line a figure is appended to the output file.
"""

import argparse
import contextlib
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/serving.py`

from benchmarks.clients import Answer, drive
from benchmarks.peer import REQUIREMENTS, peer_python
from benchmarks.report import report
from benchmarks.servers import Server, mlx_server, our_server
from benchmarks.serving_checkpoint import serving_checkpoints

CLIENTS = (1, 4, 8)
BARS = {1: 1.0, 4: 1.0, 8: 4.0}  # least ratio of tokens per second
PROMPT_WORDS, CONTEXT = 24, 512
RESERVED = r"<\|reserved_token_\d+\|>"
GATE_TOKENS, GATE_PROMPTS = 16, 3


def main(argv: list[str] | None = None) -> int:
  """Runs the gate and the load; returns 0 when both sides agree and every bar is met."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--quick", action="store_true", help="one round of one short answer a client")
  parser.add_argument("--workdir", type=Path, default=Path(".cache/benchmarks"), help="as in benchmarks.run")
  parser.add_argument("--output", type=Path, default=None, help="JSON lines (default: WORKDIR/serving.jsonl)")
  options = parser.parse_args(argv)
  workdir = options.workdir.resolve()
  workdir.mkdir(parents=True, exist_ok=True)
  rounds, requests, tokens = (1, 1, 16) if options.quick else (3, 2, 64)
  mine, theirs = serving_checkpoints(workdir)
  python = peer_python(workdir)
  with contextlib.ExitStack() as running:  # ends both, even where ending one fails: the other one is stopped
    started = lambda server: running.enter_context(contextlib.closing(server))
    servers = [started(our_server(mine, max(CLIENTS), CONTEXT, workdir / "serving-ours.log"))]
    servers.append(started(mlx_server(python, theirs, workdir / "serving-mlx-lm.log")))
    figures = [gate(servers)]
    if figures[0]["passed"]:
      figures += load(servers, rounds, requests, tokens)
  output = options.output or workdir / "serving.jsonl"
  report(figures, output, dtype="float32", peer=", ".join(REQUIREMENTS))
  print("\n".join(table(figures[1:])))
  return 0 if all(figure["passed"] for figure in figures) else 1


def prompts(seed: int) -> Iterator[str]:
  """Texts of random words, none of them twice: no side can have read one before."""
  random = np.random.default_rng(seed)
  while True:
    words = ("".join(map(chr, random.integers(97, 123, random.integers(2, 9)))) for _ in range(PROMPT_WORDS))
    yield " ".join(words)


def gate(servers: list[Server]) -> dict:
  """Compares what both sides count and answer.

  mlx-lm strips a space in front and writes the names of reserved ids, which we leave out: no difference.
  """
  texts = prompts(seed=1)
  asked = [next(texts) for _ in range(GATE_PROMPTS)]
  answers = [answered(server, [asked], GATE_TOKENS)[1] for server in servers]
  counts = [[(answer.prompt_tokens, answer.new_tokens) for answer in side] for side in answers]
  spoken = [[re.sub(RESERVED, "", answer.text).lstrip(" ") for answer in side] for side in answers]
  same_counts, same_text = counts[0] == counts[1], spoken[0] == spoken[1]
  return {
    "figure": "gate",
    "prompt_tokens": [count for count, _ in counts[0]],
    "same_counts": same_counts,
    "same_text": same_text,
    "passed": same_counts and same_text,
  }


def load(servers: list[Server], rounds: int, requests: int, tokens: int) -> Iterator[dict]:
  """Yields a figure for each number of clients; the first answers of each side are not counted."""
  texts = prompts(seed=2)
  taken = {(server.name, clients): [] for clients in CLIENTS for server in servers}
  for server in servers:
    answered(server, [[next(texts)] for _ in range(max(CLIENTS))], 4)
  with tqdm(total=rounds * len(taken), desc="load", disable=not sys.stderr.isatty()) as bar:
    for number in range(rounds):
      for clients in CLIENTS:
        asked = [[next(texts) for _ in range(requests)] for _ in range(clients)]
        for server in servers if number % 2 == 0 else reversed(servers):
          taken[server.name, clients].append(answered(server, asked, tokens))
          bar.update()
  for clients in CLIENTS:
    mine, theirs = (side(taken[server.name, clients]) for server in servers)
    times = mine["tokens_per_second"]["median"] / theirs["tokens_per_second"]["median"]
    yield {
      "figure": f"serving_{clients}_clients",
      "requests": rounds * clients * requests,
      "max_tokens": tokens,
      "ours": mine,
      "mlx_lm": theirs,
      "ratio": round(times, 2),
      "bar": BARS[clients],
      "passed": times >= BARS[clients],
    }


def answered(server: Server, asked: list[list[str]], tokens: int) -> tuple[float, list[Answer]]:
  """Drives one side while it alone runs."""
  server.resume()
  try:
    return drive(server.port, asked, tokens)
  finally:
    server.pause()


def side(taken: list[tuple[float, list[Answer]]]) -> dict:
  """Figures of one side: all tokens, tokens per second of the rounds, milliseconds to the first text."""
  counted = [sum(answer.new_tokens for answer in answers) for _, answers in taken]
  rates = [tokens / seconds for tokens, (seconds, _) in zip(counted, taken)]
  first = [1e3 * answer.first for _, answers in taken for answer in answers]
  rate = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
  return {
    "new_tokens": sum(counted),
    "tokens_per_second": {name: round(value, 2) for name, value in rate.items()},
    "ttft_ms": {f"p{p}": round(float(np.percentile(first, p)), 1) for p in (50, 99)},
  }


def table(figures: list[dict]) -> Iterator[str]:
  """Yields the lines of a Markdown table."""
  if figures:
    yield "| clients | requests | tokens/s ours | mlx-lm | ratio | TTFT p50/p99 ms ours | mlx-lm |"
    yield "|---|---|---|---|---|---|---|"
  for figure in figures:
    rates = [figure[name]["tokens_per_second"] for name in ("ours", "mlx_lm")]
    firsts = [figure[name]["ttft_ms"] for name in ("ours", "mlx_lm")]
    spoken = [f"{rate['median']} ({rate['min']}-{rate['max']})" for rate in rates]
    waits = [f"{first['p50']} / {first['p99']}" for first in firsts]
    cells = [figure["figure"].split("_")[1], figure["requests"], *spoken, f"{figure['ratio']}x", *waits]
    yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
  sys.exit(main())
