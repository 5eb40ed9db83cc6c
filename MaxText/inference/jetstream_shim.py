"""Imports JetStream as it was left: on a jax that has moved on, without TensorFlow, and without its log.

google-jetstream 0.2.2 calls `jax.tree_map`, which jax has given up, and it needs two names of seqio, which
brings TensorFlow, for vocabularies that we never open. Its orchestrator makes the root logger write all there
is to stdout. All of that is put right here, and only here.
"""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax

from MaxText.common.errors import InputError

DISTRIBUTION = "google-jetstream==0.2.2"
_INSTALL = (
  'the JetStream server needs: pip install "maxtext-kimi-k3[jetstream]" (3.2 GB with TensorFlow); without: '
  f'pip install "maxtext-kimi-k3[jetstream-slim]" && pip install --no-deps {DISTRIBUTION}'
)


class JetStream(NamedTuple):
  """The modules of JetStream that a server needs.

  Attributes:
    engine_api: the contract of an engine.
    orchestrator: its scheduler (`Driver`) and its gRPC service (`LLMOrchestrator`).
    messages: requests and responses.
    services: the server's and the client's side of the gRPC service.
  """

  engine_api: ModuleType
  orchestrator: ModuleType
  messages: ModuleType
  services: ModuleType


class SeqioVocabulary:
  """Stands where JetStream expects a vocabulary of seqio; it cannot be opened."""

  def __init__(self, *given: Any, **named: Any):
    """Refuses to be made."""
    raise ModuleNotFoundError("seqio is not installed; JetStream's own vocabularies need it", name="seqio")


def load() -> JetStream:
  """Returns the modules of JetStream, imported at the first call.

  Raises:
    InputError: it cannot be imported, for want of it or of what it needs; says how to install it.
  """
  if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map
  try:
    with _seqio(), _root_logger_kept():
      from jetstream.core import orchestrator
      from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
      from jetstream.engine import engine_api
  except ModuleNotFoundError as lacking:
    raise InputError(f"{lacking.name.partition('.')[0]} is not installed; {_INSTALL}") from None
  except Exception as failure:  # protobuf and grpc have errors of their own for a version that does not fit
    reason = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    raise InputError(f"JetStream cannot be imported: {reason}; {_INSTALL}") from failure
  return JetStream(engine_api, orchestrator, jetstream_pb2, jetstream_pb2_grpc)


@contextlib.contextmanager
def _seqio() -> Iterator[None]:
  """Provides the two names of seqio, where it is not installed, for the time of an import."""
  if "seqio" in sys.modules or importlib.util.find_spec("seqio"):
    yield
    return
  package, vocabularies = ModuleType("seqio"), ModuleType("seqio.vocabularies")
  package.vocabularies = vocabularies
  vocabularies.Vocabulary = vocabularies.SentencePieceVocabulary = SeqioVocabulary
  sys.modules.update({"seqio": package, "seqio.vocabularies": vocabularies})
  try:
    yield
  finally:  # nobody else shall think that it is installed
    del sys.modules["seqio"], sys.modules["seqio.vocabularies"]


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
  """Gives the root logger its level and its handlers back."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  try:
    yield
  finally:
    root.setLevel(level)
    root.handlers[:] = handlers
