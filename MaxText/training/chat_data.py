"""Training data of chats: lines of OpenAI messages as token ids and the tokens to learn.

A line is a JSON object with `messages` and, if there are any, `tools`, as OpenAI's fine-tuning takes them; an
assistant message of `weight` 0 is context only. The ids are those that serving asks with, because both go
through the same renderer. A mistake is one line that begins with the file and the line's number.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from MaxText.common.errors import InputError, did_you_mean
from MaxText.tokenizers.chat import json_text
from MaxText.tokenizers.chat.formats import ChatFormat
from MaxText.tokenizers.chat.messages import AssistantMessage, Conversation, MessageError, read_conversation
from MaxText.tokenizers.chat.options import ChatOptions

KEYS = ("messages", "tools")


@dataclasses.dataclass(frozen=True)
class ChatExample:
  """One conversation to train on.

  Attributes:
    ids: [T] int32 tokens of the whole conversation.
    is_output: [T] whether the model itself generates a token: the tokens whose prediction is learnt. Token t
      is predicted at position t - 1; the first token is never an output.
  """

  ids: Int[np.ndarray, "T"]
  is_output: Bool[np.ndarray, "T"]


def read_examples(
  path: Path, chat: ChatFormat, *, max_tokens: int, options: ChatOptions | None = None
) -> Iterator[ChatExample]:
  """Yields the examples of a jsonl file in its order; empty lines are passed over.

  Args:
    path: the file.
    chat: the model's chat format.
    max_tokens: tokens of the longest example that can be trained on.
    options: as for `example_of`.

  Raises:
    InputError: the file cannot be read or has no example, or a line is as `example_of` refuses it.
  """
  found = False
  try:
    with open(path, "rb") as lines:
      for number, raw in enumerate(lines, start=1):
        line = _decode(raw, f"{path}:{number}")
        if line.strip():
          found = True
          yield example_of(line, chat, f"{path}:{number}", max_tokens=max_tokens, options=options)
  except OSError as error:
    raise InputError(f"{path}: cannot be read: {error.strerror}") from None
  if not found:
    raise InputError(f"{path}: no conversation in the file")


def _decode(raw: bytes, where: str) -> str:
  try:
    return raw.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise InputError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from None


def example_of(
  line: str, chat: ChatFormat, where: str, *, max_tokens: int, options: ChatOptions | None = None
) -> ChatExample:
  """Renders one line.

  Args:
    line: JSON object with `messages` and perhaps `tools`; other keys are not read.
    chat: the model's chat format.
    where: what an error begins with, the file and the line's number.
    max_tokens: tokens of the longest example that can be trained on.
    options: whether and how much the model thinks; None is thinking with full effort, where the format has
      it.

  Raises:
    InputError: the line is no JSON object, a message or tool cannot be used, there is nothing to learn,
      thoughts would be lost, or there are more than `max_tokens` tokens.
  """
  options = dataclasses.replace(options or ChatOptions(), generation_prompt=False)
  try:
    entry = _read_object(line)
    conversation = read_conversation(entry["messages"], entry.get("tools"))
    _check_assistants(conversation, options)
    rendered = chat.render(conversation, options)
  except MessageError as error:
    raise InputError(f"{where}: {error}") from None
  if len(rendered.ids) > max_tokens:
    raise InputError(
      f"{where}: the conversation has {len(rendered.ids)} tokens, expected at most {max_tokens}"
    )
  return ChatExample(np.array(rendered.ids, np.int32), np.array(rendered.is_output, bool))


def _read_object(line: str) -> Mapping[str, Any]:
  try:
    entry = json_text.read(line)
  except ValueError as error:
    raise MessageError("line", f"not JSON: {error}") from None
  if not isinstance(entry, dict):
    raise MessageError("line", f"expected an object with 'messages', got {type(entry).__name__}")
  for key in entry:
    # data carries keys of its own, such as an id; one that looks like a slip would lose the tools in silence
    if key not in KEYS and (hint := did_you_mean(key, KEYS)):
      raise MessageError(key, f"unknown key{hint}")
  if "messages" not in entry:
    raise MessageError("line", f"no key 'messages', only {', '.join(map(repr, entry)) or 'an empty object'}")
  return entry


def _check_assistants(conversation: Conversation, options: ChatOptions) -> None:
  answers = [
    (i, message) for i, message in enumerate(conversation.messages) if isinstance(message, AssistantMessage)
  ]
  if not any(message.weight for _, message in answers):
    found = "all of them have weight 0" if answers else "there is none"
    raise MessageError("messages", f"expected an assistant message to learn, but {found}")
  for i, message in answers:
    if message.reasoning.strip() and not options.thinking:
      raise MessageError(f"messages[{i}].reasoning_content", "would be lost, because thinking is off")
