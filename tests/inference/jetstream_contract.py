"""The contracts of JetStream's two versions, written from what its documentation and its users say of them.

`contract` stands for a version's module `engine_api`; `Loop` for its scheduler, in one thread and one step at
a time, following the convention that engines are told to keep: a request ends with a stop token, with a token
that is not valid, or when its length exceeds its limit.
"""

import abc
import dataclasses
from collections import deque
from types import SimpleNamespace

import numpy as np

SHARED = ("prefill", "generate", "insert", "load_params", "get_prefix_destination_sharding", "get_tokenizer")
SHARED += ("init_decode_state", "max_concurrent_decodes", "samples_per_slot", "max_prefill_length", "mesh")
OLD = (*SHARED, "colocated_cpus")
NEW = (*OLD, "prefill_multisampling", "bulk_insert", "use_chunked_prefill", "prefill_chunk_size")


@dataclasses.dataclass
class ResultTokens:
  """Rows of (token, valid, length), for each slot."""

  data: np.ndarray
  tokens_idx: tuple
  valid_idx: tuple
  length_idx: tuple
  samples_per_slot: int

  def row(self, slot):
    assert self.samples_per_slot == 1 and self.data.dtype == np.int32
    cut = lambda bounds: int(self.data[slot, bounds[0] : bounds[1]].item())
    return cut(self.tokens_idx), cut(self.valid_idx), cut(self.length_idx)


def contract(names):
  """An `engine_api` whose Engine has these abstract members."""
  body = {name: abc.abstractmethod(lambda self: None) for name in names}
  members = {
    "Engine": abc.ABCMeta("Engine", (abc.ABC,), body),
    "ResultTokens": ResultTokens,
    "tokenizer_pb2": SimpleNamespace(TokenizerParameters=SimpleNamespace),
  }
  return SimpleNamespace(**members, **({"ExistingPrefix": object} if "bulk_insert" in names else {}))


@dataclasses.dataclass(eq=False)
class Request:
  """One request, and the ids that its client has."""

  ids: list
  limit: int
  told: list = dataclasses.field(default_factory=list)
  is_complete: bool = False


class Loop:
  """A scheduler of one engine."""

  def __init__(self, engine, tells_first_token):
    self.engine, self.is_new = engine, tells_first_token
    self.free = deque(range(engine.max_concurrent_decodes))
    self.live, self.waiting = {}, deque()
    self.tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    self.state = engine.init_decode_state()

  def ask(self, ids, limit):
    self.waiting.append(Request(list(ids), limit))
    return self.waiting[-1]

  def run(self):
    while self.waiting or self.live:
      self.step()

  def step(self):
    while self.waiting and self.free:
      self._admit(self.waiting.popleft(), self.free.popleft())
    self.state, results = self.engine.generate(None, self.state)
    for slot, request in list(self.live.items()):
      self._process(request, results, slot)
      if request.is_complete:
        del self.live[slot]
        self.free.append(slot)
        if self.is_new:
          self.engine.free_resource(slot)

  def _admit(self, request, slot):
    padded = np.array([self.tokenizer.bos_id, *request.ids, *[self.tokenizer.pad_id] * 5])
    assert self.engine._engine.resources.free_slots  # in one thread, to wait for one would take for ever
    prefix = self.engine.prefill(params=None, padded_tokens=padded, true_length=len(request.ids) + 1)
    if self.is_new:
      prefix, first = prefix
      assert "cache" in prefix
      self._process(request, first, 0)
      request.is_complete = False  # JetStream forgets that the first token may have ended it
    more = {"request_id": 7} if self.is_new else {}
    self.state = self.engine.insert(prefix, self.state, slot=slot, **more)
    self.live[slot] = request

  def _process(self, request, results, slot):
    token, is_valid, length = results.row(slot)
    request.is_complete |= length > request.limit
    if request.is_complete:
      return
    is_stop = token in self.tokenizer.stop_tokens
    request.is_complete = is_stop or not is_valid
    if not request.is_complete or self.is_new:  # the later version tells what ended the request, too
      request.told.append(token)
