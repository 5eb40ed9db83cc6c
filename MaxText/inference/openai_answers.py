"""Answers in OpenAI's interface: whole, or in the chunks of a stream."""

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from MaxText.inference.openai_jobs import ServedModel
from MaxText.inference.serving import Ended, Reason, Token, Tokens
from MaxText.tokenizers.chat.events import (
  AnswerBuilder,
  ArgumentsDelta,
  ContentDelta,
  Event,
  Finish,
  ReasoningDelta,
  ToolCallStart,
)

_LEAST_LOGPROB = -9999.0  # OpenAI's word for minus infinity, which JSON lacks
_FAILURES: dict[Reason, tuple[int, str, str]] = {
  "cancelled": (499, "cancelled", "the request was cancelled"),
  "deadline": (408, "request_timeout", "the answer took longer than a request may"),
  "not_finite": (500, "not_finite", "the model's logits are NaN or infinite; this answer ends here"),
  "error": (500, "internal_error", "the server failed on this request"),
  "shutdown": (503, "shutting_down", "the server shut down before the answer was whole"),
}


class AnswerFailure(Exception):
  """An answer that did not come to its end.

  Attributes:
    status: of HTTP.
    code: what went wrong, in a word.
  """

  def __init__(self, reason: Reason):
    self.status, self.code, message = _FAILURES[reason]
    super().__init__(message)


@dataclasses.dataclass
class _Choice:
  """What has come of one answer."""

  tokens: list[Token] = dataclasses.field(default_factory=list)
  pieces: list[Any] = dataclasses.field(default_factory=list)
  reason: Reason | None = None
  characters: int = 0  # of the tokens so far, for text_offset


class Answers:
  """The answers to one request while they come; a subclass gives them their form.

  Attributes:
    prompt_tokens: of all its prompts.
  """

  kind, chunk_kind, prefix = "", "", ""

  def __init__(self, model: ServedModel, count: int, prompt_tokens: int, *, logprobs: bool, usage: bool):
    """Starts with nothing.

    Args:
      model: what answers.
      count: answers that are wanted.
      prompt_tokens: of all its prompts.
      logprobs: tell the log-probability of each token.
      usage: end a stream with the usage.
    """
    self.prompt_tokens = prompt_tokens
    self._tokenizer = model.tokenizer
    self._logprobs, self._usage = logprobs, usage
    self._choices = [_Choice() for _ in range(count)]
    self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time())}
    self._head["model"] = model.name

  @property
  def is_whole(self) -> bool:
    """Whether every answer has ended."""
    return all(choice.reason is not None for choice in self._choices)

  def add(self, index: int, event: Tokens | Ended) -> None:
    """Takes an event of an answer.

    Raises:
      AnswerFailure: the answer will not come to its end.
    """
    choice = self._choices[index]
    if isinstance(event, Ended):
      if event.reason in _FAILURES:
        raise AnswerFailure(event.reason)
      choice.reason = event.reason
      choice.pieces += event.pieces
    else:
      choice.tokens += event.tokens
      choice.pieces += [piece for token in event.tokens for piece in token.pieces]

  def whole(self) -> dict[str, Any]:
    """Returns the response, when every answer has ended."""
    choices = [
      {"index": index, **self._body(choice), **self._logprobs_of(choice, choice.tokens)}
      for index, choice in enumerate(self._choices)
    ]
    return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

  def beginning(self) -> Iterator[dict[str, Any]]:
    """Yields the chunks with which a stream begins."""
    yield from ()

  def chunks(self, index: int, event: Tokens | Ended) -> Iterator[dict[str, Any]]:
    """Takes an event of an answer, as `add`, and yields the chunks that tell it."""
    choice = self._choices[index]
    self.add(index, event)
    if isinstance(event, Ended):
      tokens, told = (), [*self._deltas(event.pieces), self._last(choice)]
    else:
      tokens = event.tokens
      told = self._deltas([piece for token in tokens for piece in token.pieces])
    extra = self._logprobs_of(choice, tokens) if tokens else {}
    for delta in told or ([self._nothing()] if extra else []):
      yield self._chunk({"index": index, **delta, **extra})
      extra = {}

  def ending(self) -> Iterator[dict[str, Any]]:
    """Yields the chunks with which a stream ends."""
    if self._usage:
      yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

  def usage(self) -> dict[str, int]:
    """Returns the tokens of prompts and answers; a stop token counts."""
    count = sum(len(choice.tokens) for choice in self._choices)
    return {
      "prompt_tokens": self.prompt_tokens,
      "completion_tokens": count,
      "total_tokens": self.prompt_tokens + count,
    }

  def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
    return {**self._head, "object": self.chunk_kind, "choices": [{"finish_reason": None, **choice}]}

  def _logprobs_of(self, choice: _Choice, tokens: Sequence[Token]) -> dict[str, Any]:
    return {"logprobs": self._described(choice, tokens) if self._logprobs else None}

  def _text(self, token: int) -> tuple[str, list[int]]:
    data = self._tokenizer.decode_bytes([token])
    return data.decode("utf-8", errors="replace"), list(data)

  def _body(self, choice: _Choice) -> dict[str, Any]:
    raise NotImplementedError

  def _deltas(self, pieces: Sequence[Any]) -> list[dict[str, Any]]:
    raise NotImplementedError

  def _nothing(self) -> dict[str, Any]:
    raise NotImplementedError

  def _last(self, choice: _Choice) -> dict[str, Any]:
    raise NotImplementedError

  def _described(self, choice: _Choice, tokens: Sequence[Token]) -> dict[str, Any]:
    raise NotImplementedError


class CompletionAnswers(Answers):
  """Answers of /v1/completions."""

  kind = chunk_kind = "text_completion"
  prefix = "cmpl"

  def _body(self, choice: _Choice) -> dict[str, Any]:
    return {"text": "".join(choice.pieces), "finish_reason": choice.reason}

  def _deltas(self, pieces: Sequence[str]) -> list[dict[str, Any]]:
    text = "".join(pieces)
    return [{"text": text}] if text else []

  def _nothing(self) -> dict[str, Any]:
    return {"text": ""}

  def _last(self, choice: _Choice) -> dict[str, Any]:
    return {"text": "", "finish_reason": choice.reason}

  def _described(self, choice: _Choice, tokens: Sequence[Token]) -> dict[str, Any]:
    texts = [self._text(token.id)[0] for token in tokens]
    offsets = []
    for text in texts:
      offsets.append(choice.characters)
      choice.characters += len(text)
    return {
      "tokens": texts,
      "token_logprobs": [_number(token.logprob) for token in tokens],
      "top_logprobs": [{self._text(i)[0]: _number(value) for i, value in token.top} for token in tokens],
      "text_offset": offsets,
    }


class ChatAnswers(Answers):
  """Answers of /v1/chat/completions."""

  kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

  def beginning(self) -> Iterator[dict[str, Any]]:
    """Yields the role of each answer."""
    for index in range(len(self._choices)):
      yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})

  def _body(self, choice: _Choice) -> dict[str, Any]:
    builder = AnswerBuilder()
    for event in choice.pieces:
      builder.add(event)
    answer = builder.answer()
    message = answer.openai(lambda _: _call_id())
    return {"message": message | {"refusal": None}, "finish_reason": answer.finish_reason}

  def _deltas(self, pieces: Sequence[Event]) -> list[dict[str, Any]]:
    deltas = (_delta(event) for event in pieces)
    return [{"delta": delta} for delta in deltas if delta is not None]

  def _nothing(self) -> dict[str, Any]:
    return {"delta": {}}

  def _last(self, choice: _Choice) -> dict[str, Any]:
    reasons = [event.reason for event in choice.pieces if isinstance(event, Finish)]
    return {"delta": {}, "finish_reason": reasons[-1]}

  def _described(self, choice: _Choice, tokens: Sequence[Token]) -> dict[str, Any]:
    return {"content": [self._entry(token) for token in tokens], "refusal": None}

  def _entry(self, token: Token) -> dict[str, Any]:
    one = lambda i, value: dict(zip(("token", "bytes"), self._text(i)), logprob=_number(value))
    return one(token.id, token.logprob) | {"top_logprobs": [one(i, value) for i, value in token.top]}


def _delta(event: Event) -> dict[str, Any] | None:
  match event:
    case ReasoningDelta(text):
      return {"reasoning_content": text}
    case ContentDelta(text):
      return {"content": text}
    case ToolCallStart(index, name, call_id):
      function = {"name": name, "arguments": ""}
      call = {"index": index, "id": call_id or _call_id(), "type": "function", "function": function}
      return {"tool_calls": [call]}
    case ArgumentsDelta(index, text):
      return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
  return None


def _call_id() -> str:
  return f"call_{secrets.token_hex(12)}"


def _number(value: float) -> float:
  return max(value, _LEAST_LOGPROB)
