"""The HTTP front in OpenAI's interface; needs the extra [serve].

Requests are checked here, answered by the scheduler, and told as JSON or as server-sent events. Who closes
the connection cancels the request. Errors have OpenAI's form: an `error` with message, type, param, code.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.responses import FileResponse

from MaxText.common.errors import InputError
from MaxText.inference import openai_jobs
from MaxText.inference.metrics import CONTENT_TYPE, Metrics
from MaxText.inference.openai_answers import AnswerFailure, Answers, ChatAnswers, CompletionAnswers
from MaxText.inference.openai_jobs import Draft, ServedModel
from MaxText.inference.openai_requests import (
  ChatBody,
  CompletionBody,
  DetokenizeBody,
  RequestError,
  TokenizeBody,
  read_body,
)
from MaxText.inference.prompts import check_ids
from MaxText.inference.scheduler import Scheduler
from MaxText.inference.serving import Ended, Event, Job, QueueFullError, RefusedError, Ticket

_LOGGER = logging.getLogger("MaxText")
_PAGE = Path(__file__).parent.parent / "assets" / "chat.html"
_READ_SECONDS = 30  # most that a client may take to send its body
_DISCARDED = 8  # times the limit that is read and thrown away, so that the client hears why
_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
_RETRY_WARM = 5  # seconds


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one client may do.

  Attributes:
    body_bytes: most bytes of a body.
    request_seconds: most time from arrival to the end of the answer.
    api_key: what a client has to know, or None.
  """

  body_bytes: int
  request_seconds: float
  api_key: str | None = None


def create_app(model: ServedModel, scheduler: Scheduler, metrics: Metrics, limits: Limits) -> FastAPI:
  """Returns the application: every route, and how errors are told.

  Args:
    model: what answers.
    scheduler: takes the jobs; started by the caller.
    metrics: what /metrics shows.
    limits: of each request.
  """
  app = FastAPI(title=f"{model.name}", docs_url=None, redoc_url=None, openapi_url=None)
  _add_errors(app)
  _add_states(app, scheduler, metrics)
  _Routes(model, scheduler, limits).add_to(app)
  return app


# --- what happened -----------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
  return Response(_bytes(value), status, headers, media_type="application/json")


def _bytes(value: Any) -> bytes:
  # half of a surrogate pair, which a client's JSON may hold, has an escape in JSON and no UTF-8
  return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")


def error_body(
  status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
  """Returns an error as OpenAI's interface has it."""
  kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
  return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _add_errors(app: FastAPI) -> None:
  @app.exception_handler(InputError)
  async def _(request: Request, error: InputError) -> Response:
    status, code = getattr(error, "status", 400), getattr(error, "code", None)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return _json(error_body(status, str(error), getattr(error, "param", None), code), status, headers)

  @app.exception_handler(RefusedError)
  async def _(request: Request, error: RefusedError) -> Response:
    status, code = (429, "queue_full") if isinstance(error, QueueFullError) else (503, "unavailable")
    headers = {"Retry-After": str(error.retry_after)}
    return _json(error_body(status, str(error), code=code), status, headers)

  @app.exception_handler(AnswerFailure)
  async def _(request: Request, error: AnswerFailure) -> Response:
    return _json(error_body(error.status, str(error), code=error.code), error.status)

  @app.exception_handler(404)
  @app.exception_handler(405)
  async def _(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json(error_body(error.status_code, message), error.status_code, error.headers)

  @app.exception_handler(Exception)
  async def _(request: Request, error: Exception) -> Response:
    return _json(error_body(500, "the server failed on this request", code="internal_error"), 500)


def _add_states(app: FastAPI, scheduler: Scheduler, metrics: Metrics) -> None:
  @app.get("/health")
  async def _() -> Response:
    return _json({"status": "ok"}) if scheduler.is_alive else _json({"status": "dead"}, 503)

  @app.get("/ready")
  async def _() -> Response:
    if scheduler.is_ready and scheduler.is_alive and not scheduler.now().is_draining:
      return _json({"status": "ready"})
    state = "draining" if scheduler.now().is_draining else "warming up"
    return _json({"status": state}, 503, {"Retry-After": str(_RETRY_WARM)})

  @app.get("/metrics")
  async def _() -> Response:
    return Response(metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

  @app.get("/")
  async def _() -> Response:
    return FileResponse(_PAGE, media_type="text/html")


# --- what is asked -----------------------------------------------------------------------------------------


class _Routes:
  """The routes that need a key."""

  def __init__(self, model: ServedModel, scheduler: Scheduler, limits: Limits):
    self._model, self._scheduler, self._limits = model, scheduler, limits

  def add_to(self, app: FastAPI) -> None:
    guard = [Depends(self._check_key)]
    for path, route, methods in (
      ("/v1/chat/completions", self.chat, ["POST"]),
      ("/v1/completions", self.completions, ["POST"]),
      ("/v1/models", self.models, ["GET"]),
      ("/v1/models/{name:path}", self.model, ["GET"]),
      ("/tokenize", self.tokenize, ["POST"]),
      ("/detokenize", self.detokenize, ["POST"]),
    ):
      app.add_api_route(path, route, methods=methods, dependencies=guard)

  async def _check_key(self, request: Request) -> None:
    wanted = self._limits.api_key
    if wanted is None:
      return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode("latin-1"), wanted.encode())
    if scheme.lower() != "bearer" or not is_right:
      raise RequestError("wrong or missing API key", code="invalid_api_key", status=401)

  async def models(self) -> Response:
    return _json({"object": "list", "data": [self._model.description()]})

  async def model(self, name: str) -> Response:
    self._model.check_name(name)
    return _json(self._model.description())

  async def tokenize(self, request: Request) -> Response:
    body = read_body(TokenizeBody, await self._read(request))
    ids = await asyncio.to_thread(openai_jobs.tokenize, self._model, body)
    return _json({"tokens": ids, "count": len(ids), "max_model_len": self._model.context})

  async def detokenize(self, request: Request) -> Response:
    body = read_body(DetokenizeBody, await self._read(request))
    self._model.check_name(body.model)
    check_ids(body.tokens, self._model.vocab_size, "tokens")
    return _json({"prompt": self._model.tokenizer.decode(body.tokens)})

  async def chat(self, request: Request) -> Response:
    return await self._answer(request, ChatBody, openai_jobs.chat_drafts, ChatAnswers)

  async def completions(self, request: Request) -> Response:
    return await self._answer(request, CompletionBody, openai_jobs.completion_drafts, CompletionAnswers)

  async def _answer(
    self,
    request: Request,
    kind: type[ChatBody] | type[CompletionBody],
    draft: Callable[[ServedModel, Any], list[Draft]],
    form: type[Answers],
  ) -> Response:
    arrived = time.monotonic()
    data = await self._read(request)
    body = read_body(kind, data)
    self._model.check_name(body.model)
    self._scheduler.check_open(body.choices)  # a flood costs no rendering
    drafts = await asyncio.to_thread(draft, self._model, body)
    call = _Call(self._scheduler, drafts, arrived, arrived + self._limits.request_seconds)
    answers = form(
      self._model,
      len(drafts),
      sum(len(each.ids) for each in drafts[:: body.choices]),
      logprobs=body.logprobs not in (None, False),
      usage=body.wants_usage,
    )
    if body.stream:
      return _EventStream(call, answers)
    return await _whole(request, call, answers)

  async def _read(self, request: Request) -> bytes:
    """Reads a body of limited size in limited time."""
    limit, kept, size = self._limits.body_bytes, [], 0
    try:
      async with asyncio.timeout(_READ_SECONDS):
        async for part in request.stream():
          size += len(part)
          if size <= limit:
            kept.append(part)
          elif size > _DISCARDED * limit:
            break
    except TimeoutError:
      raise RequestError(
        f"the body did not come within {_READ_SECONDS} s", code="request_timeout", status=408
      ) from None
    if size > limit:
      raise RequestError(
        f"the body has more than {limit} bytes, the most that is read", code="body_too_large", status=413
      )
    return b"".join(kept)


# --- what is answered --------------------------------------------------------------------------------------


class _Call:
  """The jobs of one request, and their events in order."""

  def __init__(self, scheduler: Scheduler, drafts: Sequence[Draft], arrived: float, deadline: float):
    self._scheduler = scheduler
    self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emit(index: int, event: Event) -> None:
      loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

    jobs = [
      Job(each.ids, each.settings, partial(emit, index), each.reader, deadline, arrived)
      for index, each in enumerate(drafts)
    ]
    self._tickets: list[Ticket] = scheduler.submit(jobs)

  async def events(self) -> AsyncIterator[tuple[int, Event]]:
    """Yields (number of the answer, event) until every answer has ended."""
    left = len(self._tickets)
    while left:
      index, event = await self._queue.get()
      left -= isinstance(event, Ended)
      yield index, event

  def cancel(self) -> None:
    """Ends what has not ended."""
    for ticket in self._tickets:
      self._scheduler.cancel(ticket)


async def _whole(request: Request, call: _Call, answers: Answers) -> Response:
  async def collect() -> None:
    async for index, event in call.events():
      answers.add(index, event)

  try:
    if not await _unless_closed(collect(), request.receive):
      return Response(status_code=499)  # nobody reads it
  finally:
    call.cancel()
  return _json(answers.whole())


class _EventStream(Response):
  """Answers as server-sent events; whoever stops to listen cancels them."""

  def __init__(self, call: _Call, answers: Answers):
    super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    del self.headers["content-length"]
    self._call, self._answers = call, answers

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    try:
      await _unless_closed(self._send_all(send), receive)
    finally:
      self._call.cancel()

  async def _send_all(self, send: Any) -> None:
    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def put(*values: Any) -> None:
      if data := b"".join(b"data: %b\n\n" % (v if isinstance(v, bytes) else _bytes(v)) for v in values):
        await send({"type": "http.response.body", "body": data, "more_body": True})

    await put(*self._answers.beginning())
    try:
      async for index, event in self._call.events():
        await put(*self._answers.chunks(index, event))
      await put(*self._answers.ending())
    except AnswerFailure as failure:  # too late for another status
      await put(error_body(failure.status, str(failure), code=failure.code))
    await put(b"[DONE]")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_closed(work: Any, receive: Callable) -> bool:
  """Runs `work` to its end, or until the client goes away; returns whether it came to its end."""

  async def closed() -> None:
    while (await receive())["type"] != "http.disconnect":
      pass

  task, watch = asyncio.ensure_future(work), asyncio.ensure_future(closed())
  try:
    await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      return False
    with contextlib.suppress(OSError):  # the client left during the last words
      task.result()
    return True
  finally:
    for each in (task, watch):
      each.cancel()
