"""JetStream's scheduler and its gRPC service around our engine, with what they get wrong put right.

Requests are checked before JetStream has them, failures reach the client as errors, and text is put together
from the bytes of all tokens, where JetStream decodes one token after the other.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from MaxText.common.errors import InputError
from MaxText.inference.jetstream_adapter import FAILED, NOT_FINITE, JetStreamMethods
from MaxText.inference.jetstream_shim import JetStream
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.stream import StreamDecoder

_LOGGER = logging.getLogger("MaxText")
_SERVED = {"max_tokens", "text_content", "token_content", "metadata", "has_bos"}  # fields, of both versions
_FAILURES = {
  FAILED: "the engine failed on this request; the server's log says how",
  NOT_FINITE: "the model's logits are not finite",
}


class DriverMethods:
  """What `driver` changes in JetStream's `Driver`."""

  def _generate_thread(self, idx: int) -> None:
    """Goes on after an assertion that another thread of JetStream can break.

    Before a step it asserts that some slot is in use. The thread that ends requests may have freed the last
    one since it looked; then the process would end. The thread keeps nothing that a new start would lose.
    """
    while True:
      try:
        return super()._generate_thread(idx)
      except AssertionError:
        _LOGGER.debug("JetStream met no request; its thread starts again")


class ServiceMethods:
  """What `service` changes in JetStream's `LLMOrchestrator`."""

  def __init__(
    self,
    driver: Any,
    engine: JetStreamMethods,
    tokenizer: KimiTokenizer,
    stop_ids: Sequence[int],
    response: Any,
  ):
    """Takes JetStream's scheduler, the engine behind it, and what turns ids into text.

    Args:
      driver: of that engine.
      engine: checks prompts.
      tokenizer: of the model.
      stop_ids: ids that are no part of a text.
      response: JetStream's `DecodeResponse`.
    """
    super().__init__(driver=driver)
    self._engine, self._tokenizer, self._stop_ids = engine, tokenizer, frozenset(stop_ids)
    self._response = response

  async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
    """Yields the tokens of an answer as JetStream's service does, and their text where text was given."""
    try:
      is_text = self._checked(request)
    except InputError as refused:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
    text = StreamDecoder(self._tokenizer)
    async for response in super().Decode(request, context):
      for sample in response.stream_content.samples:
        for token in sample.token_ids:
          if token in _FAILURES:
            await context.abort(grpc.StatusCode.INTERNAL, _FAILURES[token])
        if is_text:
          sample.text = "".join(text.push(token) for token in sample.token_ids if token not in self._stop_ids)
      yield response
    if is_text and (rest := text.flush()):
      content = self._response.StreamContent
      yield self._response(stream_content=content(samples=[content.Sample(text=rest)]))

  def _checked(self, request: Any) -> bool:
    """Whether a request gives text; raises an `InputError` where it cannot be answered."""
    for field, value in request.ListFields():
      if field.name not in _SERVED and (field.name, value) != ("num_samples", 1):
        raise InputError(f"{field.name}: got {value!r}, but only {', '.join(sorted(_SERVED))} are served")
    if request.max_tokens < 0:
      raise InputError(f"max_tokens: got {request.max_tokens}, expected a whole number >= 0")
    kind = request.WhichOneof("content")
    if kind is None:
      raise InputError("content: missing, expected text_content or token_content")
    is_text = kind == "text_content"
    self._engine.check_prompt(
      self._tokenizer.encode(request.text_content.text) if is_text else list(request.token_content.token_ids)
    )
    return is_text


def driver(jetstream: JetStream, engine: JetStreamMethods) -> Any:
  """Returns JetStream's scheduler of one engine, with its threads running."""
  kind = type("Driver", (DriverMethods, jetstream.orchestrator.Driver), {})
  return kind(
    prefill_engines=[engine],
    generate_engines=[engine],
    prefill_params=[None],
    generate_params=[None],
    interleaved_mode=True,
    jax_padding=False,
  )


def service(
  jetstream: JetStream,
  running: Any,
  engine: JetStreamMethods,
  tokenizer: KimiTokenizer,
  stop_ids: Sequence[int],
) -> Any:
  """Returns JetStream's gRPC service of a scheduler from `driver`; arguments as those of `ServiceMethods`."""
  kind = type("Service", (ServiceMethods, jetstream.orchestrator.LLMOrchestrator), {})
  return kind(running, engine, tokenizer, stop_ids, jetstream.messages.DecodeResponse)
