"""Speed of decoding against mlx-lm on one checkpoint, correctness first.

  python benchmarks/run.py --quick

Writes (once) a K3 checkpoint of about 180M float32 parameters, checks that both sides give the same logits
and the same greedy tokens, then times both in one run, alternating. Only ratios within a run mean anything.
One JSON line a figure is appended to the output file.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/run.py`

from benchmarks.checkpoint import SHAPE, benchmark_checkpoint
from benchmarks.depth import depth_figures
from benchmarks.ours import Ours
from benchmarks.peer import REQUIREMENTS, Peer
from benchmarks.report import report
from benchmarks.timing import Rate, ratio

TOLERANCE = 2e-3  # float32 on both sides; logits of this checkpoint reach about 10
BARS = {"decode_batch_1": 2.0, "decode_batch_8": 4.0, "prefill_512": 10.0}


def main(argv: list[str] | None = None) -> int:
  """Runs the gate and the timings; returns 0 when both sides agree and every bar is met."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--quick", action="store_true", help="2 repeats of 24 steps instead of 5 of 64")
  parser.add_argument(
    "--workdir", type=Path, default=Path(".cache/benchmarks"), help="checkpoint and peer environment"
  )
  parser.add_argument("--output", type=Path, default=None, help="JSON lines (default: WORKDIR/results.jsonl)")
  parser.add_argument(
    "--skip-depth", action="store_true", help="leave out compile time and memory at 9 and 45 layers"
  )
  options = parser.parse_args(argv)
  options.workdir.mkdir(parents=True, exist_ok=True)
  repeats, steps = (2, 24) if options.quick else (5, 64)
  directory = benchmark_checkpoint(options.workdir)
  peer = Peer(options.workdir, directory)
  ours = Ours(directory, steps)
  try:
    figures = [gate(ours, peer, steps)]
    if figures[0]["passed"]:
      figures += timings(ours, peer, repeats, steps)
  finally:
    peer.close()
  if not options.skip_depth:
    figures.append(depth_figures())
  report(
    figures,
    options.output or options.workdir / "results.jsonl",
    dtype="float32",
    peer=", ".join(REQUIREMENTS),
  )
  return 0 if all(figure["passed"] for figure in figures) else 1


def prompt(length: int) -> list[int]:
  """Token ids from a seed, none of them special."""
  return np.random.default_rng(length).integers(0, SHAPE["vocab_size"] - 8, length).tolist()


def gate(ours: Ours, peer: Peer, steps: int) -> dict:
  """Compares logits of two prompts and the greedy continuation of one."""
  errors = [float(np.abs(ours.logits(prompt(n)) - peer.logits(prompt(n))).max()) for n in (16, 100)]
  (_, mine), (_, theirs) = ours.decode(1, prompt(32), steps), peer.decode(1, prompt(32), steps)
  same = mine[:steps] == theirs
  passed = max(errors) <= TOLERANCE and same
  return {"figure": "gate", "max_logit_error": max(errors), "same_greedy_tokens": same, "passed": passed}


def timings(ours: Ours, peer: Peer, repeats: int, steps: int) -> list[dict]:
  """Times both sides alternately; the first round of each compiles and is not counted."""
  figures = []
  for name, bar in tqdm(BARS.items(), desc="timing", disable=not sys.stderr.isatty()):
    kind, size = name.rsplit("_", 1)
    if kind == "prefill":
      run, tokens = (lambda side, n=int(size): side.prefill(prompt(n))), int(size)
    else:
      run, tokens = (lambda side, b=int(size): side.decode(b, prompt(32), steps)[0]), int(size) * steps
    run(ours)
    rounds = [(run(ours), run(peer)) for _ in range(repeats)]
    mine, theirs = (Rate(tokens, seconds) for seconds in zip(*rounds))
    times = ratio(mine, theirs)
    figures.append(
      {
        "figure": name,
        "unit": "tokens/s",
        "ours": mine.report(),
        "mlx_lm": theirs.report(),
        "ratio": round(times, 2),
        "bar": bar,
        "passed": times >= bar,
      }
    )
  return figures


if __name__ == "__main__":
  sys.exit(main())
