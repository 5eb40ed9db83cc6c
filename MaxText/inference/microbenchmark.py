"""Times what serving is made of, on the engine that serves: prompts, insertion, decoding, memory, requests.

The keys of the results are those of maxtext's inference microbenchmark where it has them, in its units; there
a time is a mean over a loop, here `time_in_ms` and `step_in_ms` are medians of single timings, which stand
beside them. What is compared is measured by turns, so that a slow minute of the machine falls on all of it.
Token ids are random: no tokenizer is needed, and the router's choices spread.

Letters: L tokens of a prompt, B requests side by side.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from MaxText.common.errors import InputError
from MaxText.configs import costs, counts
from MaxText.configs.options import MicrobenchmarkOptions
from MaxText.configs.schema import Config
from MaxText.inference import measurement
from MaxText.inference.engine import Engine
from MaxText.inference.measurement import clocked, distribution
from MaxText.inference.microbenchmark_attention import attention_steps
from MaxText.inference.microbenchmark_extent import WARMUP, Extent, steps
from MaxText.inference.microbenchmark_load import serve_load
from MaxText.inference.prompts import Settings

Results = dict[str, Any]


class Microbenchmark:
  """The stages, on one engine that nothing else uses."""

  def __init__(
    self, engine: Engine, cfg: Config, options: MicrobenchmarkOptions, reach: Extent, weights: nnx.State
  ):
    """Takes over an idle engine.

    Args:
      engine: of the extent that `extent` returned.
      cfg: the model.
      options: the keys of this command.
      reach: from `extent`.
      weights: the parameters that the engine holds.
    """
    self._engine, self._cfg, self._options, self._reach = engine, cfg, options, reach
    leaves = jax.tree.leaves(weights)
    self._weight_bytes = sum(leaf.nbytes for leaf in leaves)
    self._devices = max(len(leaf.sharding.device_set) for leaf in leaves)
    self._random = np.random.default_rng(options.seed)
    self._lengths = list(dict.fromkeys(options.inference_microbenchmark_prefill_lengths))
    self._rounds = options.inference_microbenchmark_loop_iters
    self._results: Results = {}
    self._compile: Results = {"engine": {"seconds": engine.compile_seconds, "programs": engine.program_count}}

  def run(self) -> Results:
    """Runs the stages that the options name, in order, and returns everything that was measured.

    Raises:
      InputError: an answer broke off; `report` has what the stages before that measured.
    """
    stages: dict[str, Callable[[], Results]] = {
      "insert": self.insert,
      "prefill": self.prefill,
      "prefill-multisampling": self.prefill_multisampling,
      "generate": self.generate,
      "sweep": self.sweep,
      "end-to-end": self.end_to_end,
    }
    wanted = set(self._options.inference_microbenchmark_stages)
    if "prefill" in wanted:
      wanted.add("insert")  # maxtext's stage of that name reports both
    self._results = {}
    for name, stage in stages.items():
      if name in wanted:
        seconds, programs = self._engine.compile_seconds, self._engine.program_count
        self._results |= stage()
        self._compile[name] = {
          "seconds": self._engine.compile_seconds - seconds,
          "programs": self._engine.program_count - programs,
        }
    return self.report()

  def report(self) -> Results:
    """Returns what was measured so far, and on what."""
    results = self._results | {"sizes": self.sizes(), "compile": self._compile}
    results |= {"device_memory": measurement.device_memory(), "environment": self._environment()}
    return results | {"flattened_results": dict(measurement.flattened(results))}

  # --- prompts ----------------------------------------------------------------------------------------------

  def insert(self) -> Results:
    """Times the entry of a new request into a slot, directly; its prompt is read afterwards, in place."""
    times = {L: [] for L in self._lengths}
    for L, is_timed in self._turns("insert", self._lengths):
      seconds, slot = self._clocked(self._entered, L)
      self._engine.reset_slot(slot)
      times[L] += [seconds] * is_timed
    return {"insert": {L: _timed("time_in_ms", samples) for L, samples in times.items()}}

  def prefill(self) -> Results:
    """Times prompts from their first chunk to the first token of the answer, and moving what came of them."""
    times = {L: ([], [], []) for L in self._lengths}
    for L, is_timed in self._turns("prefill", self._lengths):
      ids, slot = self._prompt(L), self._entered(L)
      read, _ = self._clocked(self._engine.read, slot, ids)
      leave, moved = self._clocked(self._engine.export_slot, slot)
      self._engine.reset_slot(slot)
      back, slot = self._clocked(self._engine.import_slot, moved)
      self._engine.reset_slot(slot)
      for samples, seconds in zip(times[L], (read, leave, back)):
        samples += [seconds] * is_timed
    move = lambda leave, back: {
      "export": _timed("time_in_ms", leave),
      "import": _timed("time_in_ms", back),
    }
    return {
      "prefill-result-sizes": {L: self._prefill_sizes(L) for L in self._lengths},
      "prefill": {L: self._prefill_report(L, read) for L, (read, _, _) in times.items()},
      "move": {L: move(leave, back) for L, (_, leave, back) in times.items()},
    }

  def prefill_multisampling(self) -> Results:
    """Times n answers to one prompt up to their first token; the prompt is read n times, as in the server."""
    wanted = list(dict.fromkeys(self._options.inference_microbenchmark_num_samples))
    times = {(L, n): [] for L in self._lengths for n in wanted}
    for (L, n), is_timed in self._turns("prefill-multisampling", list(times)):
      seconds, slots = self._clocked(self._began, [self._prompt(L)] * n)
      self._free(slots)
      times[L, n] += [seconds] * is_timed
    report = lambda L: {n: _timed("time_in_ms", times[L, n]) for n in wanted}
    return {"prefill-multisampling": {L: report(L) for L in self._lengths}}

  def _prefill_report(self, length: int, seconds: Sequence[float]) -> Results:
    chunk = self._engine.prefill_chunk_size
    starts = range(0, length, chunk)
    flops = costs.pass_flops(self._cfg, 1, length, 0, logits=1)._asdict()
    # logits are computed once, of the last token
    each = [
      costs.pass_bytes(self._cfg, 1, min(chunk, length - start), start, logits=start == starts[-1])
      for start in starts
    ]
    moved = dict(zip(costs.Bytes._fields, map(sum, zip(*each))))
    tflops = sum(flops.values()) / 1e12 / self._devices
    report = _timed("time_in_ms", seconds)
    return report | {
      "total_tflops_per_device": tflops,
      "tflops_per_sec_per_device": tflops / report["time_in_ms"] * 1e3,
      "tokens_per_second": length / report["time_in_ms"] * 1e3,
      "chunks": len(starts),
      "flops": flops,
      "bytes": moved,
    }

  def _prefill_sizes(self, length: int) -> Results:
    """What a prompt leaves: logits of its last token, a slot's state, and a latent for each token."""
    cfg = self._cfg
    values = costs.state_values(cfg) + length * costs.latent_values(cfg)
    size = costs.state_bytes(cfg) + length * costs.latent_bytes(cfg)
    item = costs.ITEM_BYTES["float32"]
    return {
      "num_logits_params": cfg.vocab_size,
      "total_logits_size": cfg.vocab_size * item,
      "avg_logits_param_size": float(item),
      "num_cache_params": values,
      "total_cache_size": size,
      "avg_cache_param_size": size / values,
    }

  # --- decoding ---------------------------------------------------------------------------------------------

  def generate(self) -> Results:
    """Times single steps of all slots, each of which holds the longest prompt."""
    B = self._options.slots
    with self._bar("generate", 1) as bar:
      single, dispatched, held = self._decoding(B, max(self._lengths), self._rounds)
      bar.update()
    report = self._decode_report(B, held, single)
    if dispatched:
      step = _timed("step_in_ms", [seconds / self._engine.steps for seconds in dispatched])
      gap = report["step_in_ms"] - step["step_in_ms"]
      report["dispatch"] = step | {"steps": self._engine.steps, "host_gap_in_ms_per_step": gap}
    return {"autoregressive": report}

  def sweep(self) -> Results:
    """Times steps over batch sizes, at the shortest context, and over contexts, with all slots."""
    options, batches = self._options, sorted(set(self._reach.batch_sizes))
    contexts = sorted(set(options.inference_microbenchmark_context_lengths))
    points = list(dict.fromkeys([(B, contexts[0]) for B in batches] + [(options.slots, c) for c in contexts]))
    times, held = {point: [] for point in points}, {}
    with self._bar("sweep", 2 * len(points)) as bar:
      for B, context in (*points, *reversed(points)):  # there and back: a drift falls on all of them
        single, _, held[B, context] = self._decoding(B, context, -(-self._rounds // 2))
        times[B, context] += single
        bar.update()
    report = lambda B, c: self._decode_report(B, held[B, c], times[B, c])
    attention = attention_steps(self._cfg, options.slots, contexts, options.page_size, self._rounds, WARMUP)
    return {
      "sweep": {
        "batch": {B: report(B, contexts[0]) for B in batches},
        "context": {c: report(options.slots, c) for c in contexts},
        "attention": attention,
      }
    }

  def _decoding(self, batch: int, context: int, rounds: int) -> tuple[list[float], list[float], float]:
    """Seconds of single steps and of whole dispatches, and how many tokens a request held in the former.

    The prompts are shorter than `context` by half of the single steps, so that the mean comes close to it.
    """
    engine = self._engine
    single, more = steps(rounds, engine.steps)
    prompt = max(1, context - single // 2)
    slots = self._began([self._prompt(prompt) for _ in range(batch)], single + more + 1)
    singles = [self._clocked(engine.decode, 1)[0] for _ in range(single)]
    dispatches = [self._clocked(engine.decode)[0] for _ in range(more // engine.steps)]
    if any(engine.length(slot) != prompt + single + more for slot in slots):
      raise InputError("an answer ended early: the model's logits are not finite")
    self._free(slots)
    return singles[WARMUP:], dispatches[WARMUP:], prompt + (WARMUP + single - 1) / 2

  def _decode_report(self, batch: int, context: float, seconds: Sequence[float]) -> Results:
    step = float(np.median(seconds))
    flops = costs.pass_flops(self._cfg, batch, 1, round(context), logits=batch)
    moved = costs.pass_bytes(self._cfg, batch, 1, round(context), logits=batch)
    return _timed("step_in_ms", seconds) | {
      "step_in_ms_per_seq": 1e3 * step / batch,
      "global_batch_size": batch,
      "total_throughput_tokens_per_second": batch / step,
      "bw_per_device_GB_per_second": moved.total / 1e9 / self._devices / step,
      "tflops_per_sec_per_device": flops.total / 1e12 / self._devices / step,
      "context_tokens": context,
      "experts_read_per_layer": costs.reached_experts(self._cfg, batch),
      "flops": flops._asdict(),
      "bytes": moved._asdict(),
    }

  # --- requests ---------------------------------------------------------------------------------------------

  def end_to_end(self) -> Results:
    """Times whole requests through the scheduler, as many at a time as there are slots."""
    options = self._options
    lengths = [self._lengths[i % len(self._lengths)] for i in range(self._reach.requests)]
    self._random.shuffle(lengths)
    with self._bar("end-to-end", len(lengths)) as bar:
      report = serve_load(
        self._engine,
        [self._prompt(L) for L in lengths],
        warm_up=[self._prompt(L) for L in self._lengths],
        new_tokens=options.max_new_tokens,
        concurrency=options.slots,
        on_end=bar.update,
      )
    return {"end-to-end": report}

  # --- what all of it shares --------------------------------------------------------------------------------

  def sizes(self) -> Results:
    """Bytes of weights and memory: what a slot takes whatever its context, and what each token adds."""
    cfg, options, reach = self._cfg, self._options, self._reach
    size = counts.count(cfg)
    tokens = reach.pages * options.page_size
    state, latent = costs.state_bytes(cfg), costs.latent_bytes(cfg)
    return {
      "model_size_in_gb": self._weight_bytes / 1e9,
      "cache_size_in_gb": (options.slots * state + tokens * latent) / 1e9,
      "model_params_in_billions": size.total / 1e9,
      "active_params_in_billions": size.active / 1e9,
      "recurrent_state_bytes_per_slot": state,
      "latent_bytes_per_token": latent,
      "slots": options.slots,
      "pages": reach.pages,
      "page_size": options.page_size,
      "max_target_length": reach.max_target_length,
    }

  def _environment(self) -> Results:
    cfg = self._cfg
    return measurement.surroundings() | {
      "model_name": cfg.model_name,
      "dtype": cfg.dtype,
      "weight_dtype": cfg.parameter_dtype,
      "packed_experts": cfg.packs_experts,
      "implementations": self._engine.implementations,
    }

  def _turns(self, stage: str, points: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields every point in each round, and whether the round counts."""
    with self._bar(stage, (WARMUP + self._rounds) * len(points)) as bar:
      for number in range(WARMUP + self._rounds):
        for point in points:
          yield point, number >= WARMUP
          bar.update()

  def _bar(self, stage: str, total: int) -> tqdm:
    return tqdm(total=total, desc=stage, disable=not sys.stderr.isatty())

  def _clocked(self, function: Callable, *arguments: Any) -> tuple[float, Any]:
    return clocked(self._engine.wait, function, *arguments)

  def _prompt(self, length: int) -> list[int]:
    return self._random.integers(0, self._cfg.vocab_size, length).tolist()

  def _entered(self, length: int, new_tokens: int = 1) -> int:
    slot = self._engine.insert(length, Settings(max_new_tokens=new_tokens), ())
    if slot is None:
      raise RuntimeError("the engine is smaller than `extent` says")
    return slot

  def _began(self, prompts: Sequence[Sequence[int]], new_tokens: int = 1) -> list[int]:
    slots = []
    for ids in prompts:
      slots.append(self._entered(len(ids), new_tokens))
      self._engine.read(slots[-1], ids)
    return slots

  def _free(self, slots: Sequence[int]) -> None:
    for slot in slots:
      self._engine.reset_slot(slot)


def _timed(key: str, seconds: Sequence[float]) -> Results:
  """A distribution below maxtext's name for the time."""
  return {key: 1e3 * float(np.median(seconds))} | distribution(seconds)


def summary(results: Results) -> Iterator[str]:
  """Yields the lines that maxtext prints for its own simulation of request traces."""
  times = lambda entries: {L: round(each["time_in_ms"], 3) for L, each in entries.items()}
  if "prefill" in results:
    yield f"PREFILL_BUCKET_SIZE_TO_MS = {times(results['prefill'])}"
  if "prefill-multisampling" in results:
    many = {L: times(each) for L, each in results["prefill-multisampling"].items()}
    yield f"MULTISAMPLING_PREFILL_BUCKET_SIZE_TO_MS = {many}"
  if "insert" in results:
    yield f"INSERT_BUCKET_SIZE_TO_MS = {times(results['insert'])}"
  if "autoregressive" in results:
    yield f"SYSTEM_TIME_PER_DECODE_TOKEN_MS = {results['autoregressive']['step_in_ms_per_seq']}"
