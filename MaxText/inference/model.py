"""A model ready to answer: configuration, weights, tokenizer and compiled programs behind four names.

This is what `MaxText.from_pretrained` returns and what the decode command runs.
"""

import json
import numbers
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from MaxText.common.errors import ConfigError
from MaxText.configs import loader
from MaxText.configs.options import DecodeOptions, MeshOptions
from MaxText.configs.schema import Config
from MaxText.inference import memory, weights
from MaxText.inference.decode_loop import NO_TOKEN, DecodeLoop, cache_capacity
from MaxText.inference.generate import BatchRun, batches
from MaxText.inference.prompts import Prompt, Request, Settings, as_ids, check_length, encode, make_requests
from MaxText.inference.results import Completion, Stats
from MaxText.models.sharding import Layout, build_layout, describe_layout
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.stream import StreamDecoder

OnText = Callable[[int, str], None]
_PADDING = Request("padding", (), 1)


class Model:
  """Answers prompts and gives logits.

  Attributes:
    config: the configuration.
    tokenizer: None for a model that takes and gives token ids only.
    weights: where the weights came from, in words.
    stop_ids: ids that end an answer unless a call names others.
    context: most tokens of prompt and answer together.
  """

  def __init__(
    self,
    config: Config,
    decoder: nnx.Module,
    tokenizer: KimiTokenizer | None,
    source: str,
    *,
    prefill_chunk: int = 512,
    steps_per_dispatch: int = 16,
    max_target_length: int | None = None,
  ):
    """Wraps a decoder; compiles nothing yet.

    Args:
      config: what the decoder was built from.
      decoder: with its weights.
      tokenizer: the checkpoint's, or None.
      source: where the weights came from, in words.
      prefill_chunk: most prompt tokens of one pass.
      steps_per_dispatch: most tokens of one decode dispatch.
      max_target_length: cache slots of a row; None for just enough.
    """
    self.config = config
    self.tokenizer = tokenizer
    self.weights = source
    self.stop_ids = default_stop_ids(config, tokenizer)
    self.context = _context(config, max_target_length)
    self._max_target_length = max_target_length
    self._layout = getattr(decoder, "layout", None)
    self._loop = DecodeLoop(decoder, prefill_chunk=prefill_chunk, steps=steps_per_dispatch)

  def logits(self, ids: Sequence[int]) -> np.ndarray:
    """Returns the [T, vocabulary] float32 logits after each of T token ids.

    Raises:
      InputError: no ids, an unknown one, or more than the context holds.
    """
    ids = encode(as_ids(ids, "ids"), None, self.config.vocab_size, "ids")
    check_length(ids, self.config.max_position_embeddings + 1, "ids")
    return self._loop.logits(ids)

  def generate(
    self,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
  ) -> list[Completion]:
    """Answers prompts, each as if it were alone.

    Args:
      prompts: texts, or sequences of token ids, of any lengths; a single one stands for a list of one.
      max_new_tokens: most tokens to add to each prompt.
      temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
      top_k: draw from the k likeliest tokens only; 0 for all.
      top_p: draw from the likeliest tokens that hold this much probability together.
      seed: of the draws; one prompt and one seed give one answer, in any batch.
      stop_ids: ids that end an answer; None for the end-of-text ids of model and tokenizer.

    Returns:
      one completion per prompt, in order.

    Raises:
      InputError: an empty prompt, one too long for the context, an unknown id, or a setting out of range.
    """
    stop = None if stop_ids is None else tuple(as_ids(stop_ids, "stop_ids"))
    settings = Settings(max_new_tokens, temperature, top_k, top_p, seed, stop)
    return self.answer(self.requests(_as_list(prompts), settings), settings)

  def requests(self, prompts: Sequence[Prompt], settings: Settings) -> list[Request]:
    """Checks prompts and settings and turns them into requests; see `generate` for what is refused."""
    settings.check(self.config.vocab_size)
    return make_requests(prompts, settings, self.tokenizer, self.config.vocab_size, self.context)

  def answer(
    self, requests: Sequence[Request], settings: Settings, on_text: OnText | None = None
  ) -> list[Completion]:
    """Answers checked requests.

    Args:
      requests: from `requests`.
      settings: the same ones.
      on_text: called with (index of the request, new text) as whole characters arrive; needs a tokenizer.
    """
    stop = self.stop_ids if settings.stop_ids is None else settings.stop_ids
    compiled = self._loop.compile_seconds
    answers = [_Answer(request, stop, self.tokenizer) for request in requests]
    groups = batches(len(requests))
    capacity = _capacity(requests, self._loop.prefill_chunk, self._max_target_length)
    rows = -(-len(groups[0]) // self._loop.row_multiple) * self._loop.row_multiple
    runs = []
    for group in groups:
      members = [requests[i] for i in group] + [_PADDING] * (rows - len(group))
      run = BatchRun(self._loop, members, settings, stop, capacity=capacity, streams=on_text is not None)
      for picked in run:
        for index, tokens in zip(group, picked):
          text = answers[index].take(tokens)
          if on_text and text:
            on_text(index, text)
      runs.append(run)
    stats = self._stats(answers, runs, self._loop.compile_seconds - compiled)
    return [answer.completion(stats) for answer in answers]

  def _stats(self, answers: Sequence["_Answer"], runs: Sequence[BatchRun], compile_seconds: float) -> Stats:
    used = self._loop.implementations
    return Stats(
      prompts=len(answers),
      prompt_tokens=sum(len(answer.request.ids) for answer in answers),
      new_tokens=sum(len(answer.token_ids) for answer in answers),
      prefill_seconds=sum(run.prefill_seconds for run in runs),
      decode_seconds=sum(run.decode_seconds for run in runs),
      compile_seconds=compile_seconds,
      first_token_seconds=runs[0].first_token_seconds,
      implementations={op: "+".join(sorted(names)) for op, names in sorted(used.items())},
      weights=self.weights,
      dtype=self.config.dtype,
      device=_device(self._layout),
    )


class _Answer:
  """One answer while it grows."""

  def __init__(self, request: Request, stop_ids: Sequence[int], tokenizer: KimiTokenizer | None):
    self.request = request
    self.token_ids: list[int] = []
    self._stop_ids = frozenset(stop_ids)
    self._stream = StreamDecoder(tokenizer) if tokenizer is not None else None
    self._text: list[str] = []

  def take(self, tokens: np.ndarray) -> str:
    """Appends the picked tokens (-1 for none) and returns the characters that they complete."""
    new = [int(token) for token in tokens if token != NO_TOKEN]
    self.token_ids += new
    if self._stream is None or not new:
      return ""
    text = "".join(self._stream.push(token) for token in new if token not in self._stop_ids)
    if self.is_complete:
      text += self._stream.flush()
    self._text.append(text)
    return text

  @property
  def is_stopped(self) -> bool:
    return bool(self.token_ids) and self.token_ids[-1] in self._stop_ids

  @property
  def is_complete(self) -> bool:
    return self.is_stopped or len(self.token_ids) == self.request.limit

  def completion(self, stats: Stats) -> Completion:
    return Completion(
      prompt_ids=list(self.request.ids),
      token_ids=self.token_ids,
      text=None if self._stream is None else "".join(self._text),
      finish_reason="stop" if self.is_stopped else "length",
      stats=stats,
    )


def _device(layout: Layout | None) -> str:
  kind = jax.devices()[0].device_kind
  return kind if layout is None else f"{layout.mesh.size} x {kind}"


def default_stop_ids(cfg: Config, tokenizer: KimiTokenizer | None) -> tuple[int, ...]:
  """Returns the ids that end an answer: the tokenizer's and the model's own (spec 1.5: either may come)."""
  ids = set(tokenizer.stop_ids if tokenizer is not None else ())
  return tuple(sorted(ids | ({cfg.eos_token_id} - {None})))


def prepare(
  config: str, cfg: Config, options: DecodeOptions, prompts: Sequence[Prompt], settings: Settings
) -> tuple[Model, list[Request]]:
  """Loads the model that a command asks for, after everything that can be checked without its weights.

  Args:
    config: what the user named as configuration.
    cfg: the model.
    options: where the weights are and how to run.
    prompts: what to answer.
    settings: how to answer, already checked.

  Returns:
    the model, and the checked prompts for its `answer`.
  """
  layout = find_layout(cfg, options)
  source = weights.find(cfg, options.checkpoint, config)
  tokenizer = weights.read_tokenizer(cfg, source)
  context = _context(cfg, options.max_target_length)
  requests = make_requests(prompts, settings, tokenizer, cfg.vocab_size, context)
  capacity = _capacity(requests, options.prefill_chunk, options.max_target_length)
  devices = 1 if layout is None else layout.mesh.size
  memory.check_fits(cfg, len(batches(len(requests))[0]), capacity, devices=devices)
  decoder, words = weights.read_decoder(cfg, source, options.seed, options.adapters, layout)
  if layout is not None:
    print(describe_layout(layout, decoder), file=sys.stderr)
  model = Model(
    cfg,
    decoder,
    tokenizer,
    words,
    prefill_chunk=options.prefill_chunk,
    steps_per_dispatch=options.steps_per_dispatch,
    max_target_length=options.max_target_length,
  )
  return model, requests


def find_layout(cfg: Config, options: MeshOptions) -> Layout | None:
  """Returns the devices that a command answers on, or None for one.

  Raises:
    ConfigError: the mesh is none, or rows would be dropped that an answer needs.
    InputError: there are fewer devices.
  """
  check_drops_nothing(cfg)
  mesh = loader.load_mesh(options)
  return None if mesh is None else build_layout(mesh)


def check_drops_nothing(cfg: Config) -> None:
  """Refuses a model that leaves out rows of its experts, as training may.

  Raises:
    ConfigError: rows would be dropped that an answer needs.
  """
  if cfg.moe_capacity_factor is not None:
    raise ConfigError("moe_capacity_factor: an answer may not depend on its neighbours; decode drops nothing")


def from_pretrained(directory: str | Path, dtype: str = "float32", **overrides: Any) -> Model:
  """Loads a checkpoint in the published layout; see `MaxText.from_pretrained`."""
  given = {"dtype": dtype, **overrides}
  # what json.dumps writes, YAML reads; strings stand bare, as on the command line
  texts = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
  cfg = loader.load(directory, texts)
  memory.check_fits(cfg)
  source = weights.find(cfg, str(directory))
  tokenizer = weights.read_tokenizer(cfg, source)
  decoder, words = weights.read_decoder(cfg, source)
  return Model(cfg, decoder, tokenizer, words)


def _context(cfg: Config, max_target_length: int | None) -> int:
  return min(cfg.max_position_embeddings, max_target_length or cfg.max_position_embeddings)


def _capacity(requests: Sequence[Request], prefill_chunk: int, max_target_length: int | None) -> int:
  longest = max(len(request.ids) for request in requests)
  limit = max(request.limit for request in requests)
  return max_target_length or cache_capacity(longest, limit, prefill_chunk)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
  if hasattr(prompts, "__array__"):  # numpy or jax: one prompt, or one a row
    return [prompts] if np.ndim(prompts) < 2 else list(prompts)
  if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], numbers.Integral)):
    return [prompts]
  return prompts
