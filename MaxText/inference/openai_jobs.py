"""From what a client asks to what the scheduler takes: prompts as ids, settings, readers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.inference.answer_readers import ChatReader, TextReader
from MaxText.inference.openai_requests import (
  COMPLETION_TOKENS,
  ChatBody,
  CompletionBody,
  RequestError,
  TokenizeBody,
)
from MaxText.inference.prompts import Settings, encode
from MaxText.inference.serving import Reader
from MaxText.tokenizers.chat.formats import ChatFormat
from MaxText.tokenizers.chat.messages import MessageError, read_conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.kimi import KimiTokenizer

MAX_PROMPTS = 64  # of one completion request


@dataclasses.dataclass(frozen=True)
class ServedModel:
  """What requests are answered with.

  Attributes:
    name: as clients call it.
    tokenizer: of the model.
    chat: its chat format, or None.
    vocab_size: ids of the model.
    stop_ids: ids that end an answer.
    context: most tokens of prompt and answer together.
    created: Unix time of its start.
  """

  name: str
  tokenizer: KimiTokenizer
  chat: ChatFormat | None
  vocab_size: int
  stop_ids: tuple[int, ...]
  context: int
  created: int

  def check_name(self, name: str | None) -> None:
    """Raises a `RequestError` of status 404 if a client asks for another model."""
    if name not in (None, self.name):
      raise RequestError(
        f"model: {name!r} is not served here; this is {self.name!r}", "model", "model_not_found", 404
      )

  def description(self) -> dict[str, Any]:
    """Returns its entry in the list of models, which says only what it can do."""
    return {
      "id": self.name,
      "object": "model",
      "created": self.created,
      "owned_by": "maxtext-kimi-k3",
      "max_model_len": self.context,
      "capabilities": {
        "chat": self.chat is not None,
        "reasoning": self.chat is not None and self.chat.has_thinking,
        "tool_calls": self.chat is not None,
        "images": False,
      },
    }


@dataclasses.dataclass(frozen=True)
class Draft:
  """One answer that is wanted: a job that nobody listens to yet."""

  ids: Sequence[int]
  settings: Settings
  reader: Reader


def chat_drafts(model: ServedModel, body: ChatBody) -> list[Draft]:
  """Returns one draft a choice of a chat.

  Raises:
    InputError: a message, option or number that cannot be served; a `RequestError` or a `MessageError`
      where it belongs to one field.
  """
  model.check_name(body.model)
  _check_chat(body)
  options = _chat_options(model, body)
  ids = chat_ids(model, body.messages, body.tools, options)
  logprobs = (body.top_logprobs or 0) if body.logprobs else 0
  if body.max_completion_tokens is not None:
    body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
  hidden = set(body.stop_token_ids or ()) - set(model.stop_ids)  # the model's own end its message
  return [
    Draft(ids, settings, ChatReader(model.chat.read_ids(options), body.stops, hidden))
    for settings in _settings(model, body, model.context, logprobs)
  ]


def chat_ids(model: ServedModel, messages: Any, tools: Any, options: ChatOptions) -> list[int]:
  """Returns the ids of a chat up to where the model goes on."""
  if model.chat is None:
    raise RequestError(f"messages: {model.name} has no chat format; use /v1/completions", "messages")
  conversation = read_conversation(messages, tools)
  options.check(conversation)
  return _checked(model, model.chat.render(conversation, options).ids, "messages")


def completion_drafts(model: ServedModel, body: CompletionBody) -> list[Draft]:
  """Returns one draft a choice of each prompt, the choices of one prompt beside each other.

  Raises:
    InputError: a prompt or a number that cannot be served.
  """
  model.check_name(body.model)
  for field in ("echo", "suffix"):
    if getattr(body, field):
      raise RequestError(f"{field}: not supported", field, "unsupported_value")
  prompts = _prompts(body.prompt)
  each = _settings(model, body, COMPLETION_TOKENS, body.logprobs or 0)
  drafts = []
  for number, prompt in enumerate(prompts):
    name = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
    ids = _checked(model, encode(prompt, model.tokenizer, model.vocab_size, name), name)
    readers = [TextReader(model.tokenizer, settings.stop_ids, body.stops) for settings in each]
    drafts += [Draft(ids, settings, reader) for settings, reader in zip(each, readers)]
  return drafts


def tokenize(model: ServedModel, body: TokenizeBody) -> list[int]:
  """Returns the ids of a text, or of a chat as it would be rendered; they may be more than the context.

  Raises:
    InputError: neither or both are given, or the chat cannot be rendered.
  """
  model.check_name(body.model)
  if (body.prompt is None) == (body.messages is None):
    raise RequestError("prompt: expected either prompt or messages", "prompt")
  if body.prompt is not None:
    return model.tokenizer.encode(body.prompt)
  if model.chat is None:
    raise RequestError(f"messages: {model.name} has no chat format", "messages")
  conversation = read_conversation(body.messages, body.tools)
  options = ChatOptions(**_thinking(model, body.reasoning_effort, body.chat_template_kwargs))
  return model.chat.render(conversation, options).ids


def _settings(
  model: ServedModel, body: ChatBody | CompletionBody, default_tokens: int, logprobs: int
) -> list[Settings]:
  each = body.settings(default_tokens, logprobs, model.stop_ids)
  each[0].check(model.vocab_size)
  return each


def _prompts(given: Any) -> list[Any]:
  prompts = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given
  if len(prompts) > MAX_PROMPTS:
    raise RequestError(f"prompt: got {len(prompts)} prompts, expected at most {MAX_PROMPTS}", "prompt")
  return prompts


def _checked(model: ServedModel, ids: list[int], field: str) -> list[int]:
  if len(ids) >= model.context:
    raise RequestError(
      f"{field}: the prompt has {len(ids)} tokens, but the context of {model.name} holds {model.context} "
      "with at least one new token",
      field.partition("[")[0],
      "context_length_exceeded",
    )
  return ids


def _check_chat(body: ChatBody) -> None:
  if body.parallel_tool_calls is False:
    raise RequestError(
      "parallel_tool_calls: false is not supported", "parallel_tool_calls", "unsupported_value"
    )
  if body.top_logprobs is not None and not body.logprobs:
    raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs", "invalid_value")


def _chat_options(model: ServedModel, body: ChatBody) -> ChatOptions:
  given = _thinking(model, body.reasoning_effort, body.chat_template_kwargs)
  if body.tool_choice is not None:
    given["tool_choice"] = body.tool_choice
  return ChatOptions(**given, response_format=body.response_format)


def _thinking(model: ServedModel, effort: str | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
  """Options of thinking: `reasoning_effort`, of which "none" means none, or the template's `thinking`."""
  unknown = set(kwargs or ()) - {"thinking"}
  if unknown:
    raise RequestError(
      f"chat_template_kwargs: unknown key {min(unknown)!r}, expected thinking", "chat_template_kwargs"
    )
  thinks = (kwargs or {}).get("thinking", effort != "none")
  if not isinstance(thinks, bool):
    raise MessageError("chat_template_kwargs.thinking", f"expected true or false, got {thinks!r}")
  if effort in (None, "none"):
    return {"thinking": thinks}
  return {"thinking": thinks, "thinking_effort": effort}
