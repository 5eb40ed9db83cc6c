"""Our engine as JetStream's orchestrator calls it: prefill, insert, generate, in both contracts that exist.

PyPI's last release (0.2.2) and the repository's last version (0.3.0) disagree on who tells a request's first
token: `generate`, one step after `insert`, or `prefill`. Which contract a JetStream has is read off its
`Engine`, never off its version number.

JetStream ends its own process when a thread of it meets an exception, and tells an engine neither how many
tokens a request may have, nor when it is over. So nothing is raised here on account of one request: its
failure is told as a token id below zero. A slot is free when the answer in it has ended, or when JetStream
puts the next request there.
"""

import dataclasses
import inspect
import logging
import threading
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from MaxText.common.errors import InputError, UnsupportedError, UserError
from MaxText.inference.engine import Engine
from MaxText.inference.engine_programs import NO_TOKEN, Picked
from MaxText.inference.prompts import Settings, check_ids
from MaxText.tokenizers.kimi import KimiTokenizer

FAILED, NOT_FINITE = -1, -2  # told in place of a token, as the last one of a request
NO_START = -1  # what JetStream is given as the start token that it puts before token ids; `prefill` drops it
_LOGGER = logging.getLogger("MaxText")
_SHORTEST, _LONGEST = 16, 32768  # JetStream pads prompts to a power of two within these bounds
_NO_PREFIX = (
  "JetStream's prefix cache and samplers are not served: a recurrent state belongs to its whole prompt"
)
_ONE_SAMPLE = "several samples of a prompt are not served through JetStream; ask once for each"
_NO_WARM_UP = (
  "JetStream's warm-up is not served (enable_model_warmup): it takes slots and never frees them, and the "
  "engine warms up by itself"
)
# longer than any limit: JetStream ends the request and tells no token
_NOTHING = (0, 0, np.iinfo(np.int32).max)


@dataclasses.dataclass(eq=False)
class Answer:
  """One request, from its prompt to the last token that JetStream is told; what JetStream calls a prefix.

  Attributes:
    slot: of our engine, None once it is free again.
    pending: the token, or the failure, that JetStream is told next.
    count: tokens that it was told.
  """

  slot: int | None = None
  pending: int | None = None
  count: int = 0

  def tell(self) -> tuple[int, int, int]:
    """Returns the pending token, whether it is one, and the length of the answer with it.

    The first token has length 1: JetStream ends a request whose length exceeds its limit, so that exactly so
    many tokens get through. A failure gets through whatever the limit is.
    """
    token, self.pending = self.pending, None
    if token is None:
      return _NOTHING
    if token >= 0:
      self.count += 1
    return token, 1, self.count * (token >= 0)


class JetStreamTokenizer:
  """The model's tokenizer as JetStream calls it: nothing is cut off, and no text gives a special id.

  Attributes:
    bos_id: no token at all; prompts of this model begin with none.
    eos_id: one of `stop_tokens`.
    pad_id: what JetStream fills up token ids with; `prefill` leaves it out.
    stop_tokens: ids that end an answer.
  """

  bos_id = NO_START
  pad_id = 0

  def __init__(self, tokenizer: KimiTokenizer, stop_ids: Sequence[int]):
    """Takes the model's own tokenizer, and the ids that end its answers."""
    self._tokenizer = tokenizer
    self.stop_tokens = set(stop_ids)
    self.eos_id = min(stop_ids, default=NO_START)

  def encode(self, s: str, **_: Any) -> tuple[np.ndarray, int]:
    """Returns the ids of a text, without padding, and their number; `prefill` refuses what is too long."""
    ids = np.array(self._tokenizer.encode(s), np.int32)
    return ids, len(ids)

  def decode(self, token_ids: Sequence[int], **_: Any) -> str:
    """Returns the text of ids that end where a character ends."""
    return self._tokenizer.decode([token for token in token_ids if token >= 0], skip_special=True)


class JetStreamMethods:
  """Everything that either contract asks of an engine; `engine_class` makes JetStream's `Engine` of it.

  Attributes:
    samples_per_slot: answers of one request.
    use_chunked_prefill: whether JetStream cuts prompts; the engine does that by itself.
    colocated_cpus: none that JetStream could use.
  """

  _contract: ModuleType
  _tells_first_token: bool
  samples_per_slot = 1
  use_chunked_prefill = False
  colocated_cpus = None

  def __init__(
    self, engine: Engine, tokenizer: KimiTokenizer, stop_ids: Sequence[int], settings: Settings | None = None
  ):
    """Takes over `engine`, which nothing else may touch from now on.

    Args:
      engine: without requests. One of its slots is for the prompt that is read before its turn, so that
        JetStream has one fewer.
      tokenizer: of the model.
      stop_ids: ids that end an answer.
      settings: how to sample, for all requests: JetStream's interface has no say in it; None is greedy.

    Raises:
      InputError: the engine has a single slot, or not all pages that its slots may need: JetStream cannot
        pause a request.
    """
    slots, pages = engine.resources.table.shape
    if slots < 2 or engine.resources.free_pages < slots * pages:
      raise InputError(
        f"JetStream's engine has {slots} slots and {engine.resources.free_pages} pages, expected at least 2 "
        f"slots, with {pages} pages each"
      )
    self._engine, self._vocab_size, self._stop_ids = engine, tokenizer.vocab_size, tuple(stop_ids)
    self._tokenizer = JetStreamTokenizer(tokenizer, stop_ids)
    self._settings = dataclasses.replace(settings or Settings(), max_new_tokens=engine.max_target_length)
    self._turn = threading.Condition()  # JetStream reads prompts and decodes in two threads
    self._answers: dict[int, Answer] = {}  # by JetStream's slots
    self._holders: set[Answer] = set()  # of slots of our engine, those still to be inserted among them
    self._is_closed = False

  # --- what JetStream calls ---------------------------------------------------------------------------------

  def prefill(
    self,
    *,
    params: Any,
    padded_tokens: Any,
    true_length: int,
    existing_prefix: Any = None,
    sampler: Any = None,
    request_id: Any = None,
  ) -> Any:
    """Reads a prompt and picks its first token; waits where no slot is free yet.

    Returns:
      an `Answer` in the dictionary that JetStream wants, and in the later contract its first token.
    """
    answer = Answer()
    with self._turn:
      try:
        if existing_prefix is not None or sampler is not None:
          raise UnsupportedError(_NO_PREFIX)
        self._read(answer, self._prompt(padded_tokens, true_length))
      except Exception as failure:
        self._fail(answer, failure)
      prefix = {"cache": answer}
      return (prefix, self._results([answer.tell()])) if self._tells_first_token else prefix

  def insert(self, prefix: dict[str, Answer], decode_state: Any, slot: int, request_id: Any = None) -> Any:
    """Lets `generate` go on with a request; whatever was in JetStream's slot before is over."""
    with self._turn:
      before = self._answers.get(slot)
      self._answers[slot] = prefix["cache"]
      if before is not None:
        self._free(before)
    return decode_state

  def generate(self, params: Any, decode_state: Any, sampler: Any = None) -> tuple[Any, Any]:
    """Returns the next token of every slot; a new one's first is told before the slot goes on.

    Raises:
      UnsupportedError: nothing was inserted yet, which only JetStream's warm-up does.
    """
    with self._turn:
      if not self._answers:
        raise UnsupportedError(_NO_WARM_UP)
      self._step()
      answers = (self._answers.get(slot) for slot in range(self.max_concurrent_decodes))
      rows = [_NOTHING if answer is None else answer.tell() for answer in answers]
    return decode_state, self._results(rows)

  def free_resource(self, slot: int) -> None:
    """Does nothing: the slot may have its next request already when JetStream says that the last is over."""

  def prefill_multisampling(self, **_: Any) -> Any:
    """Raises an `UnsupportedError`: a request has one answer here."""
    raise UnsupportedError(_ONE_SAMPLE)

  def bulk_insert(self, prefix: Any, decode_state: Any, slots: Sequence[int]) -> Any:
    """Raises an `UnsupportedError`: a request has one answer here."""
    raise UnsupportedError(_ONE_SAMPLE)

  def load_params(self, *_: Any, **__: Any) -> None:
    """Returns nothing: the engine holds the weights."""

  def init_decode_state(self, *_: Any, **__: Any) -> None:
    """Returns nothing: the engine holds the state."""

  def get_prefix_destination_sharding(self) -> Any:
    """Raises an `UnsupportedError`: prompts are read where they are answered."""
    raise UnsupportedError(
      "prefill and decoding in two engines are not served; use JetStream's interleaved mode"
    )

  def get_tokenizer(self) -> Any:
    """Returns empty parameters, which `build_tokenizer` does not need."""
    return self._contract.tokenizer_pb2.TokenizerParameters()

  def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
    """Returns the model's tokenizer."""
    return self._tokenizer

  @property
  def max_concurrent_decodes(self) -> int:
    """Requests that are answered side by side."""
    return len(self._engine.resources.table) - 1

  @property
  def max_prefill_length(self) -> int:
    """What JetStream pads the longest prompt to, with the start token that it puts before it."""
    return max(_SHORTEST, min(1 << (self._engine.max_target_length - 1).bit_length(), _LONGEST))

  @property
  def longest_prompt(self) -> int:
    """Most tokens of a prompt: one new token has to fit the engine, and a start token JetStream's padding."""
    return min(self._engine.max_target_length, _LONGEST) - 1

  @property
  def prefill_chunk_size(self) -> int:
    """Tokens of a prompt in one pass of the model."""
    return self._engine.prefill_chunk_size

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The device that the engine runs on."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

  # --- what our server calls --------------------------------------------------------------------------------

  def check_prompt(self, ids: Sequence[int]) -> None:
    """Refuses a prompt that cannot be read; any thread may ask.

    Raises:
      InputError: it is empty, too long, or has an id outside the vocabulary.
    """
    if not 1 <= len(ids) <= self.longest_prompt:
      raise InputError(f"prompt: got {len(ids)} tokens, expected 1 to {self.longest_prompt}")
    check_ids(ids, self._vocab_size, "prompt")

  def close(self) -> None:
    """Lets nothing wait for a slot any more, so that JetStream's threads can end."""
    with self._turn:
      self._is_closed = True
      self._turn.notify_all()

  # --- with the lock held -----------------------------------------------------------------------------------

  def _prompt(self, padded_tokens: Any, true_length: int) -> list[int]:
    """The ids of a prompt as it was before JetStream padded it, or cut it."""
    ids, length = np.asarray(padded_tokens).tolist(), int(true_length)
    if length > len(ids):
      raise InputError(f"prompt: got {length} tokens, expected 1 to {self.longest_prompt}")
    ids = ids[:length]
    ids = ids[1:] if ids[:1] == [NO_START] else ids
    self.check_prompt(ids)
    return ids

  def _read(self, answer: Answer, ids: list[int]) -> None:
    """Reads a whole prompt into a slot; the answers wait for it, as JetStream would have it anyway."""
    engine = self._engine
    self._turn.wait_for(lambda: self._is_closed or engine.resources.free_slots)
    answer.slot = engine.insert(len(ids), self._settings, self._stop_ids)
    if answer.slot is None:
      raise InputError("the server stops, and no slot is free for a prompt that waits")
    self._holders.add(answer)
    self._take(answer, engine.read(answer.slot, ids))

  def _step(self) -> None:
    """Picks the next token of every answer that has none pending."""
    going = [each for each in self._answers.values() if each.slot is not None and each.pending is None]
    if not going:
      return
    try:
      picked = self._engine.decode(1, only=[each.slot for each in going])
    except Exception:
      self._recover()
      return
    for answer in going:
      self._take(answer, picked)

  def _take(self, answer: Answer, picked: Picked) -> None:
    """Notes what was picked for an answer, and frees its slot if that ends it."""
    if answer.slot is None:  # lost with the engine's state, since it was picked
      return
    token = int(picked.token[answer.slot, 0])
    answer.pending = NOT_FINITE if token == NO_TOKEN else token
    if not self._engine.active[answer.slot]:
      self._free(answer)

  def _free(self, answer: Answer) -> None:
    """Frees the slot of an answer, if it still has one."""
    slot, answer.slot = answer.slot, None
    self._holders.discard(answer)
    if slot is None:
      return
    try:
      self._engine.reset_slot(slot)
    except Exception:
      self._recover()
    self._turn.notify_all()

  def _fail(self, answer: Answer, failure: Exception) -> None:
    """Ends one request, and the others only where the engine's state is lost."""
    if isinstance(failure, UserError):
      _LOGGER.warning("a request is refused: %s", failure)
    elif self._engine.is_intact:
      _LOGGER.exception("a request fails")
    if self._engine.is_intact:
      self._free(answer)
    else:
      self._recover()
    answer.pending = FAILED

  def _recover(self) -> None:
    """Starts the engine again after a failure that none of the requests in its slots survives."""
    _LOGGER.exception("the engine fails; it starts again without the requests in its slots")
    self._engine.restart()
    for answer in self._holders:
      answer.slot, answer.pending = None, FAILED
    self._holders.clear()
    self._turn.notify_all()

  def _results(self, rows: list[tuple[int, int, int]]) -> Any:
    """The rows (token, whether it is one, length of the answer) as JetStream reads them."""
    return self._contract.ResultTokens(
      data=np.array(rows, np.int32),
      tokens_idx=(0, 1),
      valid_idx=(1, 2),
      length_idx=(2, 3),
      samples_per_slot=1,
    )


def engine_class(contract: ModuleType) -> type[JetStreamMethods]:
  """Returns our engine as a class of JetStream's.

  Args:
    contract: its module `engine_api`.

  Raises:
    UnsupportedError: that contract asks for what neither known one does.
  """
  if unknown := sorted(contract.Engine.__abstractmethods__ - set(dir(JetStreamMethods))):
    raise UnsupportedError(
      f"this JetStream's Engine asks for {', '.join(unknown)}; known are the contracts of google-jetstream "
      "0.2.2 and of its repository's last version, 0.3.0"
    )
  result = inspect.signature(contract.Engine.prefill).return_annotation
  first_token = hasattr(contract, "ExistingPrefix") or typing.get_origin(result) is tuple
  own = {"_contract": contract, "_tells_first_token": first_token, "__doc__": JetStreamMethods.__doc__}
  return type("JetStreamEngine", (JetStreamMethods, contract.Engine), own)
