"""An engine that says what it is told to, with real slots and pages: servers are tested in no time."""

import time
from typing import NamedTuple

import numpy as np

from MaxText.common.errors import InputError
from MaxText.inference.engine import Engine
from MaxText.inference.engine_programs import ALTERNATIVES, NO_TOKEN, Picked
from MaxText.inference.resources import Resources


class Paused(NamedTuple):
  """A request outside the engine."""

  length: int
  request: tuple


class ScriptedEngine:
  """Answers the requests in order with the token lists of `answers`, the last of them again and again.

  Attributes:
    answers: what the next requests are answered with.
    seconds: that a step takes.
    gate: None, or an event without which no step is taken.
    picked: tokens so far.
    broken: slots whose logits are not finite from now on.
  """

  is_intact = True
  prefill_chunk_size = 16
  read = Engine.read

  def __init__(self, *, slots=2, pages=128, page_size=16, max_target_length=1024, steps=1, ranks=1):
    self.steps = steps
    self._shape = dict(
      slots=slots,
      pages=pages,
      page_size=page_size,
      pages_per_slot=-(-max_target_length // page_size),
      ranks=ranks,
    )
    self.max_target_length = max_target_length
    self.answers, self.seconds, self.gate, self.picked, self.broken = [[0]], 0.0, None, 0, set()
    self.restart()

  def restart(self):
    self.resources = Resources(**self._shape)
    self._running = {}
    self.active = np.zeros(self._shape["slots"], bool)

  def warm_up(self):
    pass

  def check(self, prompt_length, stop_ids):
    if prompt_length >= self.max_target_length:
      raise InputError(f"prompt: {prompt_length} tokens")

  def insert(self, prompt_length, settings, stop_ids):
    slot = self.resources.acquire(prompt_length + 1)
    if slot is not None:
      script = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
      limit = min(settings.max_new_tokens, self.max_target_length - prompt_length)
      self._running[slot] = [list(script[:limit]), set(stop_ids), prompt_length, settings.logprobs]
    return slot

  def prefill_chunk(self, slot, ids):
    pass

  def begin(self, slot):
    self.active[slot] = True
    return self._pick([slot], 1)

  def grow(self, slot, steps):
    self._running[slot][2] += steps
    return self.resources.grow(slot, min(self._running[slot][2], self.max_target_length))

  def decode(self, limit=None, only=None):
    if self.gate is not None:
      self.gate.wait(10)
    time.sleep(self.seconds)
    going = np.flatnonzero(self.active).tolist()
    return self._pick([slot for slot in going if only is None or slot in only], self.steps)

  def finite(self):
    return np.array([slot not in self.broken for slot in range(len(self.active))])

  def export_slot(self, slot):
    script, stop_ids, length, logprobs = self._running[slot]
    return Paused(length, (list(script), stop_ids, length, logprobs))

  def import_slot(self, moved):
    slot = self.resources.acquire(moved.length + 1)
    if slot is not None:
      self._running[slot], self.active[slot] = list(moved.request), True
    return slot

  def reset_slot(self, slot):
    self.resources.release(slot)
    self.active[slot] = False
    self.broken.discard(slot)
    del self._running[slot]

  def _pick(self, slots, steps):
    shape = (len(self.active), steps)
    token = np.full(shape, NO_TOKEN, np.int32)
    top = np.zeros((*shape, ALTERNATIVES), np.int32) + np.arange(ALTERNATIVES, dtype=np.int32)
    for slot in slots:
      script, stop_ids, *_ = self._running[slot]
      self.active[slot] &= slot not in self.broken
      for step in range(steps * bool(self.active[slot])):
        token[slot, step] = script.pop(0)
        self.picked += 1
        self.active[slot] = bool(script) and token[slot, step] not in stop_ids
        if not self.active[slot]:
          break
    return Picked(token, np.full(shape, -0.5, np.float32), top, -1.0 - top.astype(np.float32))
