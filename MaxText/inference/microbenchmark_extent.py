"""How far the engine of a microbenchmark has to reach, from the keys alone."""

import dataclasses
from collections.abc import Iterator

from MaxText.common.errors import InputError
from MaxText.configs import costs, counts
from MaxText.configs.options import MicrobenchmarkOptions
from MaxText.configs.schema import Config

WARMUP = 2  # repeats that are not counted
_KEY = "inference_microbenchmark_"


@dataclasses.dataclass(frozen=True)
class Extent:
  """How far the engine reaches in a benchmark.

  Attributes:
    max_target_length: most tokens of a request, prompt and answer together.
    pages: of the pool.
    batch_sizes: of the sweep.
    requests: of the stage end-to-end.
  """

  max_target_length: int
  pages: int
  batch_sizes: tuple[int, ...]
  requests: int


def extent(cfg: Config, options: MicrobenchmarkOptions) -> Extent:
  """Decides how far the engine has to reach, before anything is allocated.

  Raises:
    InputError: a key asks for more tokens, answers or requests at a time than there can be.
  """
  key, tokens, new = max(_needs(options), key=lambda need: need[1] + need[2])
  limit = min(cfg.max_position_embeddings, options.max_target_length or tokens + new)
  if tokens + new > limit:
    bound = "max_target_length" if limit == options.max_target_length else "max_position_embeddings"
    raise InputError(f"{_KEY}{key}: {tokens} tokens and {new} new ones exceed {bound} {limit}")
  batches = options.inference_microbenchmark_batch_sizes
  for key, numbers in (("batch_sizes", batches), ("num_samples", _wanted_samples(options))):
    if numbers and max(numbers) > options.slots:
      raise InputError(
        f"{_KEY}{key}: {max(numbers)} exceeds slots {options.slots}; give slots={max(numbers)}"
      )
  pages = options.pages_of_all_slots(limit)
  if options.pages is not None and options.pages < pages:
    all_of_them = f"{options.slots} requests of {limit} tokens each take {pages}"
    raise InputError(f"pages: {options.pages} are too few: {all_of_them}")
  return Extent(
    max_target_length=limit,
    pages=options.pages or pages,
    batch_sizes=batches or (*_powers_of_two(options.slots), options.slots),
    requests=options.inference_microbenchmark_requests or 4 * options.slots,
  )


def attention_bytes(cfg: Config, options: MicrobenchmarkOptions) -> int:
  """Returns the bytes that the sweep allocates beside the engine: a layer of one kind, with its memory."""
  if "sweep" not in options.inference_microbenchmark_stages:
    return 0
  pages = -(-(max(options.inference_microbenchmark_context_lengths) + 1) // options.page_size)
  held = {"kda": 1, "mla": pages * options.page_size}  # of a slot
  item = costs.ITEM_BYTES[cfg.parameter_dtype]
  return max(
    counts.attention_parameters(cfg, kind) * item
    + options.slots * held[kind] * costs.layer_memory_bytes(cfg, kind)
    for kind in costs.attention_kinds(cfg)
  )


def _needs(options: MicrobenchmarkOptions) -> Iterator[tuple[str, int, int]]:
  """Yields a key, its longest prompt, and the tokens that follow it, for each stage that is wanted."""
  stages = options.inference_microbenchmark_stages
  longest = max(options.inference_microbenchmark_prefill_lengths)
  new = sum(steps(options.inference_microbenchmark_loop_iters, options.steps_per_round)) + 1
  if {"prefill", "insert", "prefill-multisampling"} & set(stages):
    yield "prefill_lengths", longest, 1
  if "generate" in stages:
    yield "prefill_lengths", longest, new
  if "end-to-end" in stages:
    yield "prefill_lengths", longest, options.max_new_tokens
  if "sweep" in stages:
    yield "context_lengths", max(options.inference_microbenchmark_context_lengths), new


def steps(rounds: int, steps_per_round: int) -> tuple[int, int]:
  """Returns the tokens that a timing of decoding gives a request: in single steps, in whole dispatches."""
  dispatches = rounds + WARMUP
  return dispatches, dispatches * steps_per_round if steps_per_round > 1 else 0


def _wanted_samples(options: MicrobenchmarkOptions) -> tuple[int, ...]:
  is_wanted = "prefill-multisampling" in options.inference_microbenchmark_stages
  return options.inference_microbenchmark_num_samples if is_wanted else ()


def _powers_of_two(limit: int) -> Iterator[int]:
  size = 1
  while size < limit:
    yield size
    size *= 2
