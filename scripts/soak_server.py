"""Mixed load on a running server: `python scripts/soak_server.py URL MINUTES [CLIENTS]`.

Clients ask, cancel, send bad bodies, read slowly and hang up, at random. Every whole greedy answer has to
equal the first one to the same prompt. At the end all slots and pages have to be free. Prints one JSON
object; exit status 1 when something was wrong.
"""

import asyncio
import collections
import json
import random
import re
import sys
import time

import httpx

PROMPTS = ["def main(", "import ", "class A:\n  def __init__(self", "for i in range(", "x = [", "# "]
KINDS = ["whole"] * 4 + ["stream"] * 3 + ["hang up", "slow", "bad body", "too long", "sampled"]


class Soak:
  """What happened so far."""

  def __init__(self, url: str, model: str, context: int):
    self.url, self.model, self.context = url, model, context
    self.counts: collections.Counter[str] = collections.Counter()
    self.answers: dict[tuple[str, int], str] = {}
    self.first_seconds: list[float] = []
    self.wrong: list[str] = []

  def check(self, prompt: str, tokens: int, text: str) -> None:
    want = self.answers.setdefault((prompt, tokens), text)
    if text != want:
      self.wrong.append(f"{prompt!r}, {tokens} tokens: {text!r} is not {want!r}")

  async def client(self, http: httpx.AsyncClient, rng: random.Random, end: float) -> None:
    while time.monotonic() < end:
      kind = rng.choice(KINDS)
      prompt, tokens = rng.choice(PROMPTS), rng.choice([1, 8, 24, 48])
      body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
      try:
        status = await self.act(http, rng, kind, body)
      except httpx.HTTPError as failure:
        self.wrong.append(f"{kind}: {type(failure).__name__}: {failure}")
        status = 0
      self.counts[f"{kind} {status}"] += 1
      if status == 429:
        await asyncio.sleep(rng.random())

  async def act(self, http: httpx.AsyncClient, rng: random.Random, kind: str, body: dict) -> int:
    if kind in ("whole", "sampled"):
      body |= {"temperature": 1, "seed": 3, "top_p": 0.9} if kind == "sampled" else {}
      reply = await http.post("/v1/completions", json=body)
      if reply.status_code == 200 and kind == "whole":
        self.check(body["prompt"], body["max_tokens"], reply.json()["choices"][0]["text"])
      return reply.status_code
    if kind == "bad body":
      content = rng.choice([b"{", b"\xff", json.dumps(body | {"n": 0}).encode()])
      return self.expect(await http.post("/v1/completions", content=content), 400)
    if kind == "too long":
      reply = await http.post("/v1/completions", json=body | {"prompt": [5] * self.context})
      return self.expect(reply, 400)
    return await self.stream(http, rng, kind, body)

  def expect(self, reply: httpx.Response, status: int) -> int:
    if reply.status_code not in (status, 429):
      self.wrong.append(f"status {reply.status_code} instead of {status}: {reply.text[:200]}")
    return reply.status_code

  async def stream(self, http: httpx.AsyncClient, rng: random.Random, kind: str, body: dict) -> int:
    text, started, leave = "", time.monotonic(), rng.randrange(6)
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
      if reply.status_code != 200:
        return reply.status_code
      async for line in reply.aiter_lines():
        if not line.startswith("data: {"):
          continue
        if not text:
          self.first_seconds.append(time.monotonic() - started)
        text += json.loads(line[6:])["choices"][0]["text"]
        if kind == "slow":
          await asyncio.sleep(0.1)
        if kind == "hang up" and (leave := leave - 1) < 0:
          return 200
    self.check(body["prompt"], body["max_tokens"], text)
    return 200


def gauges(text: str) -> dict[str, float]:
  """The gauges and counters of /metrics that a report needs."""
  return {name: float(value) for name, value in re.findall(r"^(maxtext_\w+(?:{[^}]*})?) (\S+)$", text, re.M)}


async def main(url: str, minutes: float, clients: int) -> int:
  async with httpx.AsyncClient(base_url=url, timeout=120) as http:
    [model] = (await http.get("/v1/models")).json()["data"]
    soak, end = Soak(url, model["id"], model["max_model_len"]), time.monotonic() + 60 * minutes
    await asyncio.gather(*(soak.client(http, random.Random(seed), end) for seed in range(clients)))
    await asyncio.sleep(2)
    told = gauges((await http.get("/metrics")).text)
  held = {name: told[f"maxtext_{name}"] for name in ("slots_used", "pages_used", "requests_waiting")}
  times = sorted(soak.first_seconds) or [0.0]
  print(
    json.dumps(
      {
        "requests": sum(soak.counts.values()),
        "kinds": dict(sorted(soak.counts.items())),
        "first_token_seconds": {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)]},
        "generated_tokens": told["maxtext_generated_tokens_total"],
        "preemptions": told["maxtext_preemptions_total"],
        "held_at_the_end": held,
        "wrong": soak.wrong[:20],
      },
      indent=2,
      ensure_ascii=False,
    )
  )
  return int(bool(soak.wrong) or any(held.values()))


if __name__ == "__main__":
  url, minutes, *rest = sys.argv[1:]
  sys.exit(asyncio.run(main(url, float(minutes), int(rest[0]) if rest else 16)))
