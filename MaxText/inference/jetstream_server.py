"""`python -m MaxText.inference.jetstream_server CONFIG key=value ...`: answers over JetStream's gRPC service.

A user's mistake is one line on stderr and exit status 2, before anything is answered. SIGTERM lets the
requests that were taken end, and takes no more.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from MaxText.common.errors import InputError
from MaxText.configs import command_line
from MaxText.configs.options import JetStreamOptions
from MaxText.configs.schema import Config
from MaxText.inference.compile_cache import compile_compactly, keep_programs

if TYPE_CHECKING:
  from MaxText.inference.jetstream_adapter import JetStreamMethods
  from MaxText.inference.jetstream_shim import JetStream
  from MaxText.inference.loading import Loaded
  from MaxText.inference.prompts import Settings

USAGE = "usage: python -m MaxText.inference.jetstream_server CONFIG key=value ...   (--help lists the keys)"
HELP = """usage: python -m MaxText.inference.jetstream_server CONFIG key=value ...

Serves a Kimi K3 or Kimi-Linear model over JetStream's gRPC interface, to JetStream's own clients.
JetStream is archived; `python -m MaxText.serve` is the server that is looked after, and it can do more.

CONFIG is a model name ({models}), a .yml file, a path inside the package
(configs/models/kimi-k3.yml), or a checkpoint directory with its own config.json.

examples:
  python -m MaxText.inference.jetstream_server kimi-k3-tiny
  python -m MaxText.inference.jetstream_server DIR port=9000 slots=16 max_target_length=32768 temperature=0.8

service: jetstream_proto.Orchestrator, Decode (text_content or token_content, max_tokens) and HealthCheck.
How tokens are drawn is the same for all requests: JetStream's interface has no field for it.

JetStream queues without a bound, and goes on with a request whose client has left. Beside the slots that
answer, one holds the prompt that is read before its turn. There is no key and no TLS: keep it to yourself.
SIGTERM and SIGINT let what was taken end, up to drain_seconds; a second one ends at once, as
does the first before it says ready. Exit status: 0, or 2 for a mistake in what was given. Needs JetStream,
with TensorFlow (the extra [jetstream], 3.2 GB) or without (the extra [jetstream-slim], then
pip install --no-deps google-jetstream==0.2.2).

keys and their defaults:"""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  return command_line.run(arguments, USAGE, HELP, JetStreamOptions, serve)


def serve(config: str, cfg: Config, options: JetStreamOptions) -> None:
  """Loads a model, and answers until a signal ends it.

  Args:
    config: what the user named as configuration.
    cfg: the model.
    options: the keys of this command.

  Raises:
    UserError: something given cannot be served, or JetStream is not installed; nothing answers yet.
  """
  from MaxText.inference import jetstream_shim, memory
  from MaxText.inference.loading import load_engine
  from MaxText.inference.model import check_drops_nothing
  from MaxText.inference.prompts import Settings

  jetstream = jetstream_shim.load()
  check_drops_nothing(cfg)
  settings = Settings(
    temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
  )
  settings.check(cfg.vocab_size)
  context = options.context(cfg.max_position_embeddings)
  slots, pages = options.slots + 1, -(-context // options.page_size)
  memory.check_fits(cfg, slots, pages * options.page_size)

  def load() -> "Loaded":
    shape = {"slots": slots, "pages": slots * pages, "page_size": options.page_size, "steps": 1}
    shape |= {"max_target_length": context, "prefill_chunk": options.prefill_chunk}
    return load_engine(config, cfg, options.checkpoint, options.seed, **shape)

  asyncio.run(_serve(jetstream, load, settings, options))


async def _serve(
  jetstream: "JetStream", load: "Callable[[], Loaded]", settings: "Settings", options: JetStreamOptions
) -> None:
  """Takes the address, loads the model, and answers; a client that is early waits."""
  import grpc

  from MaxText.inference import address

  # asyncio would have Ctrl-C cancel this task, which waits for nothing while a model is loaded and compiled
  signal.signal(signal.SIGINT, signal.default_int_handler)
  # two servers on one port would share its requests without a word
  server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
  host = f"[{options.host}]" if ":" in options.host else options.host
  try:
    port = server.add_insecure_port(f"{host}:{options.port}")
  except RuntimeError:
    raise InputError(f"host, port: cannot listen on {options.host}:{options.port}") from None
  print(f"listening on {host}:{port}", file=sys.stderr, flush=True)
  address.warn_of_strangers(options.host, "there is no key to ask for")
  await run(jetstream, server, load(), settings, options.drain_seconds)


async def run(
  jetstream: "JetStream", server: Any, loaded: "Loaded", settings: "Settings", drain_seconds: float
) -> None:
  """Answers until a signal, then lets what was taken end.

  Args:
    jetstream: its modules.
    server: of grpc.aio, with its address, not yet started.
    loaded: the model.
    settings: how to sample, already checked.
    drain_seconds: that what was taken may last after a signal.
  """
  from MaxText.inference import jetstream_service
  from MaxText.inference.jetstream_adapter import engine_class

  engine, tokenizer, stop_ids = loaded
  adapter = engine_class(jetstream.engine_api)(engine, tokenizer, stop_ids, settings)
  began = time.monotonic()
  engine.warm_up()
  stopped = _signalled()
  async with _driven(jetstream, adapter) as driver:
    service = jetstream_service.service(jetstream, driver, adapter, tokenizer, stop_ids)
    jetstream.services.add_OrchestratorServicer_to_server(service, server)
    await server.start()
    slots, longest = adapter.max_concurrent_decodes, adapter.longest_prompt
    held = f"{slots} requests at a time, prompts of up to {longest} tokens"
    print(f"ready after {time.monotonic() - began:.0f} s: {held}", file=sys.stderr, flush=True)
    await stopped.wait()
    print("draining: what was taken may end, nothing more is taken", file=sys.stderr, flush=True)
    await server.stop(drain_seconds)


@contextlib.asynccontextmanager
async def _driven(jetstream: "JetStream", adapter: "JetStreamMethods") -> AsyncIterator[Any]:
  """Yields JetStream's scheduler and ends it whatever happens: a thread of it would keep the process."""
  from MaxText.inference import jetstream_service

  driver = jetstream_service.driver(jetstream, adapter)
  try:
    yield driver
  finally:
    adapter.close()
    await asyncio.to_thread(driver.stop)


def _signalled() -> asyncio.Event:
  """An event that the first signal sets; the second ends the process, and no thread of it is waited for."""
  loop, stopped = asyncio.get_running_loop(), asyncio.Event()

  def stop() -> None:
    stopped.set()
    for each in SIGNALS:
      loop.remove_signal_handler(each)
      signal.signal(each, signal.SIG_DFL)

  for each in SIGNALS:
    loop.add_signal_handler(each, stop)
  return stopped


if __name__ == "__main__":
  os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # an address that is taken is told in our own words
  keep_programs(os.environ)
  compile_compactly(os.environ)
  sys.exit(main())
