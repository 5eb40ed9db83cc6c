"""An engine that answers a prompt with its own ids, and breaks down where a prompt asks for it."""

import numpy as np

from tests.inference.scripted_engine import ScriptedEngine

STOP = 769
# ids in prompts, and what goes wrong then; ordinary ids otherwise
PREFILL_FAILS, DECODE_FAILS, STATE_IS_LOST, RESET_FAILS, NOT_A_NUMBER, SILENT = (
  1001,
  1002,
  1003,
  1004,
  1005,
  1006,
)


class EchoEngine(ScriptedEngine):
  """Answers with the ids of the prompt, then with the stop id; SILENT is answered with the stop id alone."""

  def __init__(self, *, slots=3, max_target_length=64, page_size=16):
    pages = slots * -(-max_target_length // page_size)
    super().__init__(slots=slots, pages=pages, page_size=page_size, max_target_length=max_target_length)

  def restart(self):
    super().restart()
    self.is_intact, self.restarts, self.prompts = True, getattr(self, "restarts", -1) + 1, {}

  def insert(self, prompt_length, settings, stop_ids):
    slot = super().insert(prompt_length, settings, stop_ids)
    if slot is not None:
      self.prompts[slot] = []
    return slot

  def prefill_chunk(self, slot, ids):
    if PREFILL_FAILS in ids:
      raise ValueError("the prompt cannot be read")
    self.prompts[slot] += ids
    self._running[slot][0] = [] if SILENT in self.prompts[slot] else list(self.prompts[slot])

  def begin(self, slot):
    room = self.max_target_length - len(self.prompts[slot])
    self._running[slot][0] = [*self._running[slot][0], STOP][:room]
    return super().begin(slot)

  def decode(self, limit=None, only=None):
    asked = {token for slot in only for token in self.prompts[slot]}
    if STATE_IS_LOST in asked:
      self.is_intact = False
    if asked & {DECODE_FAILS, STATE_IS_LOST}:
      raise RuntimeError("out of memory")
    self.broken |= {slot for slot in only if NOT_A_NUMBER in self.prompts[slot]}
    return super().decode(limit, only)

  def reset_slot(self, slot):
    prompt = self.prompts.pop(slot)
    if RESET_FAILS in prompt:
      raise RuntimeError("the slot cannot be wiped")
    super().reset_slot(slot)

  @property
  def used(self):
    return self.resources.used_slots, self.resources.used_pages

  def finite(self):
    return np.ones(len(self.active), bool)
