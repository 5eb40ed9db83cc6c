"""What a user asks for: prompts as text, token ids or a file, checked before anything is compiled.

A prompt is never truncated and an id never clamped: what cannot be served is refused with the numbers.
"""

import dataclasses
import json
import math
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.common.errors import InputError
from MaxText.tokenizers.kimi import KimiTokenizer

Prompt = str | Sequence[int]
MAX_SEED = 2**32 - 1
MAX_LOGPROBS = 20  # the limit of OpenAI's interface


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to answer; the same for every prompt of a call.

  Attributes:
    max_new_tokens: most tokens to add to a prompt.
    temperature: 0 is greedy.
    top_k: likeliest tokens to draw from, 0 for all.
    top_p: probability mass to draw from, in (0, 1].
    seed: of the random numbers, 0 to 2**32 - 1.
    stop_ids: token ids that end an answer; None for the end-of-text ids of model and tokenizer.
    min_p: least probability to draw, as a share of the likeliest token's, in [0, 1).
    presence_penalty: taken off the logit of every token that the answer already has, -2 to 2.
    frequency_penalty: taken off for each time that the answer has it, -2 to 2.
    logprobs: alternatives whose log-probabilities are wanted beside the picked token's, 0 to 20.
  """

  max_new_tokens: int = 64
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  stop_ids: tuple[int, ...] | None = None
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logprobs: int = 0

  def check(self, vocab_size: int) -> None:
    """Refuses settings that no model of `vocab_size` ids can serve.

    Raises:
      InputError: a value is out of its range.
    """
    _require(_is_int(self.max_new_tokens, 1), "max_new_tokens", self.max_new_tokens, "a whole number > 0")
    _require(_is_number(self.temperature, 0, math.inf), "temperature", self.temperature, "a number >= 0")
    _require(_is_int(self.top_k, 0), "top_k", self.top_k, "a whole number >= 0")
    in_range = _is_number(self.top_p, 0, 1) and self.top_p > 0
    _require(in_range, "top_p", self.top_p, "a number > 0 and <= 1")
    _require(_is_int(self.seed, 0, MAX_SEED), "seed", self.seed, f"a whole number from 0 to {MAX_SEED}")
    check_ids(self.stop_ids or (), vocab_size, "stop_ids")
    in_range = _is_number(self.min_p, 0, 1) and self.min_p < 1
    _require(in_range, "min_p", self.min_p, "a number >= 0 and < 1")
    for key in ("presence_penalty", "frequency_penalty"):
      _require(_is_number(getattr(self, key), -2, 2), key, getattr(self, key), "a number from -2 to 2")
    _require(_is_int(self.logprobs, 0, MAX_LOGPROBS), "logprobs", self.logprobs, f"0 to {MAX_LOGPROBS}")


@dataclasses.dataclass(frozen=True)
class Request:
  """One prompt that passed every check.

  Attributes:
    name: what messages call it.
    ids: its token ids.
    limit: most new tokens, so that prompt and answer fit the context.
  """

  name: str
  ids: Sequence[int]
  limit: int


def make_requests(
  prompts: Sequence[Prompt],
  settings: Settings,
  tokenizer: KimiTokenizer | None,
  vocab_size: int,
  context: int,
) -> list[Request]:
  """Checks every prompt and turns it into a request; nothing is answered unless all of them can be.

  Args:
    prompts: texts or token ids.
    settings: how to answer, already checked.
    tokenizer: None for a model that knows ids only.
    vocab_size: ids of the model.
    context: most tokens of prompt and answer together.

  Raises:
    InputError: no prompt, or one that `encode` or `check_length` refuses.
  """
  if not len(prompts):
    raise InputError("prompts: got none, expected at least one")
  requests = []
  for index, prompt in enumerate(prompts, 1):
    name = "prompt" if len(prompts) == 1 else f"prompt {index}"
    ids = encode(prompt, tokenizer, vocab_size, name)
    check_length(ids, context, name)
    requests.append(Request(name, ids, min(settings.max_new_tokens, context - len(ids))))
  return requests


def encode(prompt: Prompt, tokenizer: KimiTokenizer | None, vocab_size: int, name: str) -> list[int]:
  """Returns the token ids of one prompt.

  Args:
    prompt: text, which can never give a special id, or token ids.
    tokenizer: None for a model that knows ids only.
    vocab_size: ids of the model.
    name: what messages call the prompt.

  Raises:
    InputError: the prompt is empty, has an unknown id, or is text without a tokenizer.
  """
  if isinstance(prompt, str):
    if prompt and tokenizer is None:
      raise InputError(
        f"{name}: this model has no tokenizer (no tiktoken.model); give token ids: prompt_ids=5,7,9"
      )
    ids = tokenizer.encode(prompt) if prompt else []
  else:
    ids = as_ids(prompt, name)
  if not ids:
    raise InputError(f"{name}: empty prompt; it needs at least one token")
  check_ids(ids, vocab_size, name)
  return [int(token) for token in ids]


def as_ids(ids: Any, name: str) -> list[Any]:
  """Returns a sequence or a 1-D array (numpy, jax) of ids as a list of Python values, or one id as a list.

  Raises:
    InputError: the value is no sequence, or an array of another rank.
  """
  values = np.asarray(ids).tolist() if hasattr(ids, "__array__") else ids
  if _is_int(values, -math.inf):
    return [values]
  if not isinstance(values, Sequence) or any(isinstance(value, list) for value in values):
    raise InputError(f"{name}: got {type(ids).__name__}, expected a flat sequence of token ids")
  return list(values)


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
  """Refuses ids outside the vocabulary.

  Raises:
    InputError: names the first such id.
  """
  for token in ids:
    if not _is_int(token, -math.inf):
      raise InputError(f"{name}: token id {token!r}: expected a whole number")
    if not 0 <= token < vocab_size:
      raise InputError(f"{name}: token id {token}: outside the vocabulary, expected 0 to {vocab_size - 1}")


def check_length(ids: Sequence[int], context: int, name: str) -> None:
  """Refuses a prompt that leaves no room for a new token.

  Raises:
    InputError: with the length of the prompt and of the context.
  """
  if len(ids) >= context:
    raise InputError(
      f"{name}: the prompt has {len(ids)} tokens, but the context holds {context} with at least one new token"
    )


def read_prompts(path: Path) -> list[Prompt]:
  """Reads a file of prompts, one a line.

  In a .jsonl file a line is a JSON string, an array of token ids, or an object with `prompt` or `prompt_ids`.

  Raises:
    InputError: the file is missing or no text, has no line, an empty one, or one of another form.
  """
  try:
    text = path.read_bytes().decode("utf-8-sig")
  except OSError as failure:
    raise InputError(f"prompts_file: {path}: {failure.strerror}") from None
  except UnicodeDecodeError as failure:
    raise InputError(f"prompts_file: {path}: not UTF-8 at byte {failure.start}") from None
  # only line feeds separate prompts: str.splitlines would cut at form feeds and others inside them
  lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
  if not lines:
    raise InputError(f"prompts_file: {path}: no prompts; write one a line")
  parse = _json_prompt if path.suffix == ".jsonl" else lambda line, name: line
  prompts = [parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
  for number, prompt in enumerate(prompts, 1):
    if not prompt:
      raise InputError(f"{path}:{number}: empty prompt; it needs at least one token")
  return prompts


def _json_prompt(line: str, name: str) -> Prompt:
  try:
    value: Any = json.loads(line)
  except json.JSONDecodeError as failure:
    raise InputError(f"{name}: not JSON ({failure})") from None
  if isinstance(value, dict):
    if len(value.keys() & {"prompt", "prompt_ids"}) != 1:
      raise InputError(
        f"{name}: expected one of the keys prompt and prompt_ids, got {', '.join(value) or 'none'}"
      )
    value = value.get("prompt", value.get("prompt_ids"))
  is_ids = isinstance(value, list) and all(isinstance(token, int) for token in value)
  if not isinstance(value, str) and not is_ids:
    raise InputError(f"{name}: expected a string or a list of token ids, got {line[:60]}")
  return value


def _require(holds: bool, key: str, value: Any, expectation: str) -> None:
  if not holds:
    raise InputError(f"{key}: got {value!r}, expected {expectation}")


def _is_int(value: Any, low: float, high: float = math.inf) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: Any, low: float, high: float) -> bool:
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_real and math.isfinite(value) and low <= value <= high
