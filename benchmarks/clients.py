"""Clients of an OpenAI-compatible server: streamed greedy completions, counted and timed."""

import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence

from benchmarks.servers import MODEL

TIMEOUT_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Answer:
  """One answer as its client saw it.

  Attributes:
    text: all of it.
    prompt_tokens: by the server's own count.
    new_tokens: the same of the answer.
    first: seconds from the request to the first text.
    seconds: to the end of the stream.
  """

  text: str
  prompt_tokens: int
  new_tokens: int
  first: float
  seconds: float


def complete(port: int, prompt: str, max_tokens: int) -> Answer:
  """Asks for one greedy completion as a stream.

  Raises:
    RuntimeError: the server refuses, or its stream lacks text or usage.
  """
  body = {
    "model": MODEL,
    "prompt": prompt,
    "max_tokens": max_tokens,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
  }
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
  start = time.perf_counter()
  connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
  response = connection.getresponse()
  if response.status != 200:
    raise RuntimeError(f"status {response.status}: {response.read(500)!r}")
  text, first, usage = "", None, None
  for line in response:
    if not line.startswith(b"data: {"):  # keep-alive comments, blank lines, [DONE]
      continue
    event = json.loads(line.removeprefix(b"data: "))
    usage = event.get("usage") or usage
    text += "".join(choice.get("text") or "" for choice in event["choices"])
    if text and first is None:
      first = time.perf_counter() - start
  connection.close()
  if first is None or usage is None:
    raise RuntimeError(f"a stream without {'text' if first is None else 'usage'}: {text[:80]!r}")
  counts = usage["prompt_tokens"], usage["completion_tokens"]
  return Answer(text, *counts, first, time.perf_counter() - start)


def drive(port: int, prompts: Sequence[Sequence[str]], max_tokens: int) -> tuple[float, list[Answer]]:
  """Lets one client for each list of prompts ask them one after the other, all clients at once.

  Args:
    port: of the server.
    prompts: of each client.
    max_tokens: of each answer.

  Returns:
    the seconds from the first request to the last answer, and all answers.
  """
  answers: list[Answer] = []
  failures: list[Exception] = []

  def client(mine: Sequence[str]) -> None:
    try:
      answers.extend(complete(port, prompt, max_tokens) for prompt in mine)
    except Exception as failure:  # told by the caller's thread
      failures.append(failure)

  seconds = _at_once([lambda mine=mine: client(mine) for mine in prompts])
  if failures:
    raise failures[0]
  return seconds, answers


def _at_once(clients: Sequence[Callable[[], None]]) -> float:
  threads = [threading.Thread(target=client) for client in clients]
  start = time.perf_counter()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return time.perf_counter() - start
