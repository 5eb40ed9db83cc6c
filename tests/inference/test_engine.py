"""The engine against the solo run of each request: same tokens, whoever sits beside, before or after."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from MaxText.common.errors import InputError
from MaxText.inference.engine_programs import NO_TOKEN
from MaxText.inference.prompts import Settings
from tests.inference.small_engine import LENGTHS, LONGEST, NEW, VOCAB, logits_after, make_engine

pytestmark = pytest.mark.usefixtures("kept_programs")  # several engines of one shape


@pytest.fixture(scope="module")
def engine(directory):
  return make_engine(directory)


GREEDY = Settings(max_new_tokens=NEW)


def start(engine, prompt, answering=GREEDY, stop_ids=(), cuts=None):
  """Reads a prompt into a free slot and picks its first token."""
  slot = engine.insert(len(prompt), answering, stop_ids)
  assert slot is not None
  offset = 0
  for size in cuts or [16] * len(prompt):
    if piece := prompt[offset : offset + size]:
      engine.prefill_chunk(slot, piece)
    offset += size
  return slot, [int(engine.begin(slot).token[slot, 0])]


def step(engine, answers, limit=None):
  """One dispatch; appends to the answers, slot -> tokens."""
  picked = engine.decode(limit).token
  for slot, tokens in answers.items():
    tokens += [int(token) for token in picked[slot] if token != NO_TOKEN]


def finish(engine, answers):
  while engine.active.any():
    step(engine, answers)


def memory(engine, slot):
  """Every bit that belongs to a slot."""
  return jax.tree.map(np.asarray, engine.export_slot(slot).state)


def assert_equal_trees(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow  # any order of events below; the scanned engine serves in tests/test_serve.py
@pytest.mark.parametrize("scan", ["false", "true"])
def test_requests_that_come_and_go_answer_as_alone(directory, requests, scan):
  """More requests than slots: a new one enters whenever one leaves."""
  engine = make_engine(directory, scan_layers=scan)
  assert bool(engine._state.pools.cycles) == (scan == "true")
  waiting, running, answers = list(enumerate(requests)), {}, {}
  while waiting or running:
    while waiting and engine.resources.free_slots and engine.resources.free_pages >= 8:
      number, (prompt, _) = waiting.pop()
      slot, answers[number] = start(engine, prompt)
      running[slot] = number
    step(engine, {slot: answers[number] for slot, number in running.items()})
    for slot in [slot for slot in running if not engine.active[slot]]:
      engine.reset_slot(slot)
      del running[slot]
  for number, (_, want) in enumerate(requests):
    assert answers[number] == want
  assert (engine.resources.free_slots, engine.resources.free_pages) == (4, 24)
  # empty, insert, two chunk widths at most, begin, decode, reset: nothing else, however requests differ
  assert engine.program_count <= 7


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_events_gives_the_solo_answers(engine, requests, data):
  count = engine.program_count
  running, moved = {}, []
  for _ in range(data.draw(st.integers(5, 25))):
    event = data.draw(st.sampled_from(["start", "start", "decode", "decode", "cancel", "move", "return"]))
    if event == "start" and engine.resources.free_slots and engine.resources.free_pages >= 8:
      number = data.draw(st.integers(0, len(requests) - 1))
      slot, tokens = start(engine, requests[number][0])
      running[slot] = (number, tokens)
    elif event == "decode":
      step(engine, {slot: tokens for slot, (_, tokens) in running.items()}, data.draw(st.integers(1, 4)))
    elif event == "cancel" and running:
      slot = data.draw(st.sampled_from(sorted(running)))
      engine.reset_slot(slot)
      del running[slot]
    elif event == "move" and running:
      slot = data.draw(st.sampled_from(sorted(running)))
      moved.append((engine.export_slot(slot), running.pop(slot)))
      engine.reset_slot(slot)
    elif event == "return" and moved:
      slot = engine.import_slot(moved[-1][0])
      if slot is not None:
        running[slot] = moved.pop()[1]
    resources = engine.resources
    assert resources.used_slots == len(running) and resources.free_slots == 4 - len(running)
    assert resources.used_pages + resources.free_pages == 24
    for number, tokens in running.values():
      assert tokens == requests[number][1][: len(tokens)]
  finish(engine, {slot: tokens for slot, (_, tokens) in running.items()})
  for slot, (number, tokens) in running.items():
    assert tokens == requests[number][1]
    engine.reset_slot(slot)
  assert engine.program_count <= max(count, 9)


def test_slots_that_are_not_chosen_keep_every_bit(engine, requests):
  """Two answers stand still while a third goes on; in the end all are those of the solo runs."""
  answers = {}
  for number in (1, 4, 7):
    slot, tokens = start(engine, requests[number][0])
    answers[slot] = (number, tokens)
  chosen, *others = answers
  before = [memory(engine, slot) for slot in others]
  for limit in (1, 3):
    picked = engine.decode(limit, only=[chosen]).token
    answers[chosen][1].extend(picked[chosen][:limit].tolist())
    assert np.all(np.delete(picked, chosen, axis=0) == NO_TOKEN)
  for slot, bits in zip(others, before):
    assert_equal_trees(memory(engine, slot), bits)
  assert np.all(engine.decode(only=[]).token == NO_TOKEN)
  finish(engine, {slot: tokens for slot, (_, tokens) in answers.items()})
  for slot, (number, tokens) in answers.items():
    assert tokens == requests[number][1]
    engine.reset_slot(slot)


def test_idle_slots_keep_every_bit(engine, requests):
  slot, _ = start(engine, requests[6][0])
  finish(engine, {slot: []})
  before = memory(engine, slot)
  other, tokens = start(engine, requests[4][0])
  finish(engine, {other: tokens})
  assert_equal_trees(memory(engine, slot), before)
  engine.reset_slot(slot)
  engine.reset_slot(other)


def test_a_stale_slot_equals_a_fresh_one(engine, directory, requests):
  for _ in range(4):  # every slot has been used
    start(engine, requests[-1][0])
  for slot in range(4):
    engine.reset_slot(slot)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(engine._state.pools))
  fresh = make_engine(directory)
  slots = [start(each, requests[3][0])[0] for each in (engine, fresh)]
  assert_equal_trees(memory(engine, slots[0]), memory(fresh, slots[1]))
  engine.reset_slot(slots[0])


@pytest.mark.parametrize("cuts", [[1] * 33, [16, 16, 1], [7, 16, 10], [2, 15, 16]])
def test_any_chunks_of_a_prompt_give_the_same_answer(engine, requests, cuts):
  prompt, want = requests[LENGTHS.index(33)]
  slot, tokens = start(engine, prompt, cuts=cuts)
  finish(engine, {slot: tokens})
  engine.reset_slot(slot)
  assert tokens == want


def test_settings_belong_to_their_slot(engine, model, requests):
  prompt = requests[5][0]
  varied = [
    Settings(max_new_tokens=NEW, temperature=1.0, seed=3),
    Settings(max_new_tokens=NEW, temperature=0.7, top_k=5, seed=4),
    Settings(max_new_tokens=3),
  ]
  started = [start(engine, prompt, answering) for answering in varied]
  finish(engine, dict(started))
  for (slot, tokens), answering in zip(started, varied):
    fields = ("max_new_tokens", "temperature", "top_k", "seed")
    [alone] = model.generate([prompt], stop_ids=(), **{name: getattr(answering, name) for name in fields})
    assert tokens == alone.token_ids
    engine.reset_slot(slot)


def test_a_stop_id_ends_the_answer_with_itself(engine, requests):
  prompt, want = requests[5]
  stop = want[3]
  slot, tokens = start(engine, prompt, stop_ids=(VOCAB - 1, stop))
  finish(engine, {slot: tokens})
  engine.reset_slot(slot)
  assert tokens == want[: want.index(stop) + 1]


def test_logprobs_are_those_of_the_model(engine, model, requests):
  prompt, want = requests[4]
  slot = engine.insert(len(prompt), dataclasses.replace(GREEDY, logprobs=3), ())
  engine.prefill_chunk(slot, prompt)
  steps = [engine.begin(slot)]
  while engine.active[slot]:
    steps.append(engine.decode())
  engine.reset_slot(slot)
  logits = logits_after(model, prompt, want).astype(np.float64)
  norms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  join = lambda name: np.concatenate([getattr(each, name)[slot] for each in steps])
  kept = join("token") != NO_TOKEN
  np.testing.assert_allclose(join("logprob")[kept], norms[np.arange(NEW), want], atol=1e-4)
  order = np.argsort(-norms, axis=-1)[:, :3]
  np.testing.assert_allclose(
    join("top_logprobs")[kept][:, :3], np.take_along_axis(norms, order, -1), atol=1e-4
  )
  assert join("top_ids")[kept][:, 0].tolist() == want


def test_penalties_push_repeated_tokens_down(engine, requests):
  prompt = requests[5][0]
  answers = {}
  for name, value in (("none", 0.0), ("frequency_penalty", 2.0), ("presence_penalty", 2.0)):
    answering = Settings(max_new_tokens=20, **({name: value} if value else {}))
    slot, tokens = start(engine, prompt, answering)
    finish(engine, {slot: tokens})
    engine.reset_slot(slot)
    answers[name] = tokens
  repeats = {name: max(map(tokens.count, tokens)) for name, tokens in answers.items()}
  assert repeats["frequency_penalty"] <= repeats["none"] and repeats["presence_penalty"] <= repeats["none"]
  assert answers["frequency_penalty"] != answers["none"] or repeats["none"] == 1


def test_a_nan_ends_its_own_request_only_and_leaves_nothing(directory, requests):
  engine = make_engine(directory)
  healthy, tokens = start(engine, requests[7][0])
  sick, _ = start(engine, requests[3][0])
  pools = jax.tree.map(lambda x: x, engine._state.pools)
  first_page = engine.resources.owned(sick)[0]
  layers = [
    dataclasses.replace(layer, latent=layer.latent.at[0, first_page].set(np.nan))
    if hasattr(layer, "latent")
    else layer
    for layer in pools.layers
  ]
  pools = dataclasses.replace(pools, layers=tuple(layers))
  engine._state = dataclasses.replace(engine._state, pools=pools)
  broken = []
  step(engine, {healthy: tokens, sick: broken})
  assert not broken and not engine.active[sick] and not engine.finite()[sick] and engine.finite()[healthy]
  engine.reset_slot(sick)
  finish(engine, {healthy: tokens})
  assert tokens == requests[7][1]
  again, answer = start(engine, requests[3][0])
  finish(engine, {again: answer})
  assert answer == requests[3][1]


def test_what_can_never_be_held_is_refused(engine):
  with pytest.raises(InputError, match="64 tokens, but a request holds 64 with at least one new token"):
    engine.insert(LONGEST, GREEDY, ())
  with pytest.raises(InputError, match="stop_ids: got 17, expected at most 16"):
    engine.insert(3, GREEDY, tuple(range(17)))


def test_what_does_not_fit_now_has_to_wait(directory):
  engine = make_engine(directory)
  slots = [engine.insert(47, GREEDY, ()) for _ in range(5)]
  assert slots[:4] == [0, 1, 2, 3] and slots[4] is None  # six pages each
  assert engine.resources.free_pages == 0
  engine.reset_slot(2)
  assert engine.insert(8, GREEDY, ()) == 2
