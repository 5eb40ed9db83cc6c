"""`python -m MaxText.serve CONFIG key=value ...`: answers over HTTP in OpenAI's interface.

A user's mistake is one line on stderr and exit status 2, before anything listens. SIGTERM lets the requests
that were taken end, and takes no more.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from MaxText.common.errors import InputError
from MaxText.configs import command_line
from MaxText.configs.options import ServeOptions
from MaxText.configs.schema import Config
from MaxText.inference.compile_cache import compile_compactly, keep_programs

if TYPE_CHECKING:
  from MaxText.inference.engine import Engine
  from MaxText.inference.openai_jobs import ServedModel
  from MaxText.models.sharding import Layout

USAGE = "usage: python -m MaxText.serve CONFIG key=value ...   (--help lists the keys)"
HELP = """usage: python -m MaxText.serve CONFIG key=value ...

Serves a Kimi K3 or Kimi-Linear model over HTTP in OpenAI's interface.

CONFIG is a model name ({models}), a .yml file, a path inside the package
(configs/models/kimi-k3.yml), or a checkpoint directory with its own config.json.

examples:
  python -m MaxText.serve kimi-k3-tiny
  python -m MaxText.serve DIR host=0.0.0.0 api_key_file=FILE slots=16 max_target_length=32768
  python -m MaxText.serve DIR mesh=tpu7x-16 slots=64
  curl -s localhost:8000/v1/completions -d '{{"model": "kimi-k3-tiny", "prompt": "def main("}}'

routes: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize; /health (alive),
/ready (compiled, and not shutting down), /metrics (Prometheus); / is a page to chat and to watch the metrics.

A request holds one slot, and pages as its tokens need them. Startup prints how many of both there are. What
does not fit waits, and what does not fit into the queue gets status 429 with Retry-After.
SIGTERM and SIGINT let what was taken end, up to drain_seconds; a second one ends at once. Exit status: 0, or
2 for a mistake in what was given. Needs the extra [serve]: pip install "maxtext-kimi-k3[serve]".

keys and their defaults:"""

GRACE_SECONDS = 5  # for the last bytes of answers that have ended


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status."""
  return command_line.run(arguments, USAGE, HELP, ServeOptions, serve)


def serve(config: str, cfg: Config, options: ServeOptions) -> None:
  """Loads a model, and answers until a signal ends it.

  Args:
    config: what the user named as configuration.
    cfg: the model.
    options: the keys of this command.

  Raises:
    UserError: something given cannot be served; nothing listens yet.
  """
  from MaxText.inference import address, memory
  from MaxText.inference.model import find_layout
  from MaxText.inference.resources import ranks_of

  _check_extra()
  layout = find_layout(cfg, options)
  context = options.context(cfg.max_position_embeddings)
  pages = options.pages or options.pages_of_all_slots(context)
  if layout is not None:
    ranks_of(layout, options.slots, pages)
  devices = 1 if layout is None else layout.mesh.size
  memory.check_fits(cfg, options.slots, options.tokens_of_a_slot(pages), devices=devices)
  key = _api_key(options)
  listener = _listener(options.host, options.port)
  if key is None:
    address.warn_of_strangers(options.host, "api_key_file=FILE has a key that they must know")
  model, engine = load(config, cfg, options, context, pages, layout)
  from MaxText.inference.metrics import Metrics
  from MaxText.inference.openai_server import Limits, create_app
  from MaxText.inference.scheduler import Scheduler

  metrics = Metrics()
  scheduler = Scheduler(engine, queue_limit=options.queue_limit, observer=metrics)
  metrics.watch(scheduler.now)
  limits = Limits(options.max_body_bytes, options.request_seconds, key)
  app = create_app(model, scheduler, metrics, limits)
  held = f"{options.slots} requests at a time, {pages * options.page_size} tokens of them all"
  ranks = f", in {engine.ranks} ranks that share neither" if engine.ranks > 1 else ""
  print(f"{model.name}: {held}, {engine.max_target_length} of each{ranks}", file=sys.stderr)
  host, port, *_ = listener.getsockname()
  print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
  began = time.monotonic()
  ready = lambda: print(f"ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
  scheduler.start(warm_up=True, on_ready=ready)
  _run(app, scheduler, listener, options.drain_seconds)


def load(
  config: str,
  cfg: Config,
  options: ServeOptions,
  context: int,
  pages: int,
  layout: "Layout | None" = None,
) -> "tuple[ServedModel, Engine]":
  """Returns the model as clients see it, and the engine that holds its weights.

  Args:
    config: what the user named as configuration.
    cfg: the model.
    options: the keys of this command.
    context: most tokens of a request.
    pages: of the pool.
    layout: of the devices, or None for one.

  Raises:
    CheckpointError: the weights cannot be used.
    InputError: the model has no tokenizer.
  """
  from MaxText.inference.loading import load_engine
  from MaxText.inference.openai_jobs import ServedModel
  from MaxText.tokenizers.chat import formats

  engine, tokenizer, stop_ids = load_engine(
    config,
    cfg,
    options.checkpoint,
    options.seed,
    layout,
    slots=options.slots,
    pages=pages,
    page_size=options.page_size,
    max_target_length=context,
    prefill_chunk=options.prefill_chunk,
    steps=options.steps_per_round,
  )
  try:
    chat = formats.chat_format(tokenizer)
  except InputError:
    chat = None
  model = ServedModel(
    name=options.served_model_name or cfg.model_name,
    tokenizer=tokenizer,
    chat=chat,
    vocab_size=cfg.vocab_size,
    stop_ids=stop_ids,
    context=engine.max_target_length,
    created=int(time.time()),
  )
  return model, engine


def _check_extra() -> None:
  try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
  except ModuleNotFoundError as lacking:
    raise InputError(
      f'{lacking.name} is not installed; the server needs: pip install "maxtext-kimi-k3[serve]"'
    ) from None


def _api_key(options: ServeOptions) -> str | None:
  if options.api_key_file is None:
    return options.api_key
  try:
    key = Path(options.api_key_file).read_text(encoding="utf-8").strip()
  except (OSError, UnicodeDecodeError) as failure:
    reason = getattr(failure, "strerror", None) or "not UTF-8"
    raise InputError(f"api_key_file: {options.api_key_file}: {reason}") from None
  if not key:
    raise InputError(f"api_key_file: {options.api_key_file}: empty")
  return key


def _listener(host: str, port: int) -> socket.socket:
  """Takes the address before anything is loaded, so that a mistake shows at once."""
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
  except OSError as failure:
    raise InputError(f"host, port: cannot listen on {host}:{port}: {failure.strerror}") from None
  return listener


def _run(app, scheduler, listener: socket.socket, drain_seconds: float) -> None:
  """Serves `app` until a signal, then drains."""
  import threading

  import uvicorn

  class Server(uvicorn.Server):
    def handle_exit(self, sig, frame):
      if scheduler.now().is_draining:
        self.should_exit = self.force_exit = True
        return
      print("draining: what was taken may end, nothing more is taken", file=sys.stderr, flush=True)
      scheduler.refuse()
      threading.Thread(target=self.drain, daemon=True).start()

    def drain(self):
      scheduler.drain(drain_seconds)
      self.should_exit = True

  settings = uvicorn.Config(
    app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="off"
  )
  Server(settings).run(sockets=[listener])


if __name__ == "__main__":
  keep_programs(os.environ)
  compile_compactly(os.environ)
  sys.exit(main())
