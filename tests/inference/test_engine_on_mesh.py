"""The engine on eight simulated devices against one: the same answers, and no memory leaves its rank."""

import functools
import math
import re

import jax
import numpy as np
import pytest

from MaxText.checkpoints.load import load_params
from MaxText.common.errors import ConfigError, InputError
from MaxText.configs import loader
from MaxText.inference.engine import Engine
from MaxText.inference.engine_programs import NO_TOKEN
from MaxText.inference.prompts import Settings
from MaxText.inference.resources import ranks_of
from MaxText.inference.scheduler import Scheduler
from MaxText.inference.serving import Job, Observer, Tokens
from MaxText.models.sharding import parameter_shardings
from tests.inference.small_engine import MARGIN, SPECIAL
from tests.models.test_sharding import changed
from tests.reference.generator import k3_config_json, write_checkpoint

pytestmark = pytest.mark.usefixtures("kept_programs")
# a dense linear layer and a full one with experts; widths that differ tell shapes apart
SHAPE = dict(num_hidden_layers=2, full_attn_layers=(2,), attn_res_block_size=1)
SHAPE |= dict(hidden_size=48, vocab_size=64, kda_heads=4)
SIZES = dict(data=2, fsdp=1, expert=2, tensor=2)
RANKS, SLOTS, STEPS, CHUNK = 4, 8, 4, 12
PAGES, PAGE_SIZE = 116, 2  # a rank has two slots, and pages for one long request
LONGEST, NEW = 64, 9
LENGTHS = (1, 5, 12, 13, 33, 40)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  config = k3_config_json(**SHAPE, **SPECIAL)
  return write_checkpoint(tmp_path_factory.mktemp("mesh"), config, seed=12, dtype="f32")


def make_engine(directory, layout=None, slots=SLOTS, pages=PAGES, **ours):
  cfg = loader.load(directory, [f"{key}={value}" for key, value in ours.items()])
  shardings = None if layout is None else functools.partial(parameter_shardings, layout)
  decoder = load_params(directory, cfg, mesh_shardings=shardings, progress=False)
  decoder.layout = layout
  shape = dict(slots=slots, pages=pages, page_size=PAGE_SIZE, max_target_length=LONGEST)
  return Engine(decoder, **shape, prefill_chunk=CHUNK, steps=STEPS)


def start(engine, prompt, **ours):
  slot = engine.insert(len(prompt), Settings(max_new_tokens=NEW, **ours), ())
  for offset in range(0, len(prompt), CHUNK):
    engine.prefill_chunk(slot, prompt[offset : offset + CHUNK])
  return slot, engine.begin(slot)


def finish(engine, slot, tokens):
  while engine.active[slot]:
    tokens += [int(token) for token in engine.decode().token[slot] if token != NO_TOKEN]
  return tokens


@pytest.fixture(scope="module")
def solo(directory):
  """Prompts and their answers on one device, one after the other; no choice hangs on a rounding error."""
  rng, answers = np.random.default_rng(3), []
  engine = make_engine(directory, slots=1, pages=LONGEST // PAGE_SIZE)
  for length in LENGTHS:
    prompt = rng.integers(0, SHAPE["vocab_size"] - 4, length).tolist()
    slot, *picked = start(engine, prompt, logprobs=2)
    while engine.active[slot]:
      picked.append(engine.decode())
    engine.reset_slot(slot)
    kept = np.concatenate([each.token[slot] for each in picked]) != NO_TOKEN
    top = np.concatenate([each.top_logprobs[slot, :, :2] for each in picked])[kept]
    assert np.min(top[:, 0] - top[:, 1]) > MARGIN
    answers.append((prompt, [int(t) for each in picked for t in each.token[slot] if t != NO_TOKEN]))
  return answers


@pytest.fixture(scope="module")
def engine(directory):
  made = make_engine(directory, changed({}, **SIZES))
  made.warm_up()
  assert made.ranks == RANKS
  return made


class Receiver:
  def __init__(self):
    self.tokens, self.ended = [], None

  def __call__(self, event):
    if isinstance(event, Tokens):
      self.tokens += [token.id for token in event.tokens]
    else:
      self.ended = event.reason


class Pauses(Observer):
  count = 0

  def preempted(self):
    self.count += 1


def assert_whole(engine, pages):
  """Of every rank, what is free and what is owned is all that it has."""
  resources = engine.resources
  for rank in range(engine.ranks):
    held = [slot for slot in resources._owned if resources.rank(slot) == rank]
    owned = [page for slot in held for page in resources.owned(slot)]
    assert len(resources._free_slots[rank]) + len(held) == SLOTS // engine.ranks
    assert sorted(resources._free_pages[rank] + owned) == list(range(pages // engine.ranks))


def answer_at_random(engine, solo, *, events, pages=PAGES):
  """Jobs that come and go through the scheduler, more of them than fit; returns how often one was paused."""
  observer = Pauses()
  scheduler = Scheduler(engine, queue_limit=16, observer=observer)
  rng, jobs = np.random.default_rng(8), []
  for _ in range(events):
    kind = rng.choice(["submit", "step", "step", "cancel"], p=[0.4, 0.25, 0.3, 0.05])
    live = [job for job in jobs if job[2].ended is None]
    if kind == "submit" and len(live) < 16:
      number, receiver = int(rng.integers(len(solo))), Receiver()
      job = Job(solo[number][0], Settings(max_new_tokens=NEW, stop_ids=()), receiver)
      jobs.append((number, scheduler.submit([job])[0], receiver))
    elif kind == "cancel" and live:
      scheduler.cancel(live[int(rng.integers(len(live)))][1])
    else:
      scheduler.step()
    assert_whole(engine, pages)
  while scheduler.step():
    assert_whole(engine, pages)
  for number, ticket, receiver in jobs:
    want = solo[number][1]
    assert receiver.ended == ("cancelled" if ticket.is_cancelled else "length")
    assert receiver.tokens == want[: len(receiver.tokens)]
    assert ticket.is_cancelled or len(receiver.tokens) == NEW
  now = scheduler.now()
  assert (now.free_slots, now.free_pages, now.used_slots, now.used_pages) == (SLOTS, pages, 0, 0)
  return observer.count


def test_requests_that_come_and_go_answer_as_alone_on_one_device(engine, solo):
  count = engine.program_count
  assert answer_at_random(engine, solo, events=60) >= 1
  assert engine.program_count == count  # nothing compiles after the warm-up


# each compiles all programs for eight devices once more
@pytest.mark.slow
@pytest.mark.parametrize(
  "rules, sizes, ours, ranks",
  [
    pytest.param({}, SIZES, dict(moe_dispatch="ragged_all_to_all"), 4, id="rows travel"),
    pytest.param({"cache_batch": ("data", "expert", "tensor")}, SIZES, {}, 8, id="latents over tensor too"),
    pytest.param({"cache_batch": ("data",)}, SIZES, {}, 2, id="fewer ranks than rows"),
    pytest.param({}, SIZES | dict(data=1, expert=1), {}, 1, id="one rank"),
  ],
)
def test_other_layouts_answer_as_one_device(directory, solo, rules, sizes, ours, ranks):
  pages = PAGES if ranks < 8 else 2 * PAGES  # enough in each for the longest request
  engine = make_engine(directory, changed(rules, **sizes), pages=pages, **ours)
  engine.warm_up()
  assert engine.ranks == ranks
  answer_at_random(engine, solo, events=60, pages=pages)
  # where latents are split over more axes than rows, those of a prompt are shown to all devices of its row
  excepted = {"_export", "_prefill"} if ranks == 8 else {"_export"}
  assert not any(moved(engine, name) for name in NAMES if name not in excepted)


def test_a_request_goes_on_in_its_own_rank_and_in_another(engine, solo):
  prompt, want = solo[-1]
  slot, picked = start(engine, prompt)
  tokens, rank = [int(picked.token[slot, 0])], engine.resources.rank(slot)
  tokens += [int(token) for token in engine.decode(2).token[slot] if token != NO_TOKEN]
  exported = engine.export_slot(slot)
  elsewhere = engine.import_slot(exported)  # its first slot still holds pages, so another rank is emptier
  assert engine.resources.rank(elsewhere) != rank
  engine.reset_slot(slot)
  assert finish(engine, elsewhere, list(tokens)) == want
  engine.reset_slot(elsewhere)
  again = engine.import_slot(exported)
  assert engine.resources.rank(again) == rank and finish(engine, again, list(tokens)) == want
  engine.reset_slot(again)


def local(engine):
  """Device -> what it holds of the memory of all slots."""
  held = {}
  for leaf in jax.tree.leaves(engine._state.pools):
    for shard in leaf.addressable_shards:
      held.setdefault(shard.device.id, []).append(np.asarray(shard.data))
  return held


def test_a_prompt_touches_the_devices_of_its_rank_only(engine, solo):
  before = local(engine)
  slot, _ = start(engine, solo[-1][0])
  rank = engine.resources.rank(slot)
  changed = [d for d, held in local(engine).items() if any(map(np.any, map(np.not_equal, held, before[d])))]
  per_rank = len(before) // RANKS
  assert changed == list(range(rank * per_rank, (rank + 1) * per_rank))
  engine.reset_slot(slot)


def test_every_device_holds_the_slots_and_pages_of_its_rank(engine):
  kda, pool = engine._state.pools.layers
  shape = lambda leaf: leaf.addressable_shards[0].data.shape
  assert shape(pool.latent) == (1, PAGES // RANKS, *pool.latent.shape[2:])
  assert shape(kda.state) == (SLOTS // RANKS, kda.state.shape[1] // 2, *kda.state.shape[2:])
  assert shape(kda.conv)[0] == shape(engine._state.counts)[0] == SLOTS // RANKS


NAMES = ("_insert", "_prefill", "_begin", "_decode", "_reset", "_export", "_import")


def moved(engine, name):
  """Results of collectives of a program that have the width of pages or of recurrent state, and are larger
  than what the new tokens of one call leave."""
  (program,) = getattr(engine, name)._compiled.values()
  kda, pool = engine._state.pools.layers
  found = re.findall(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
    program.as_text(),
  )
  shapes = [
    tuple(map(int, dims.split(","))) for each in found for dims in re.findall(r"f32\[([\d,]+)\]", each)
  ]
  rows = lambda shape: math.prod(shape[:-1])
  wide = [shape for shape in shapes if len(shape) > 2 and shape[-1] == pool.latent.shape[-1]]
  state = [shape for shape in shapes if len(shape) > 2 and shape[-2:] == kda.state.shape[-2:]]
  return state + [shape for shape in wide if rows(shape) > CHUNK * SLOTS // RANKS]


def test_no_program_moves_pages_or_recurrent_rows(engine):
  """Export alone does: what one slot has, which is to leave the devices."""
  for name in NAMES:
    found = moved(engine, name)
    assert bool(found) == (name == "_export"), (name, found)
    assert all(math.prod(shape) <= LONGEST * shape[-1] for shape in found)


def test_programs_update_the_state_in_place_and_keep_its_layout(engine, solo):
  leaves = lambda: jax.tree.leaves(engine._state)
  layouts = [leaf.sharding for leaf in leaves()]
  held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves())
  for name in NAMES:
    (program,) = getattr(engine, name)._compiled.values()
    assert program.memory_analysis().alias_size_in_bytes == (0 if name == "_export" else held), name

  def run(act, *arguments):
    before = leaves()
    result = act(*arguments)
    assert all(leaf.is_deleted() for leaf in before)
    assert [leaf.sharding for leaf in leaves()] == layouts
    return result

  slot = run(engine.insert, 5, Settings(max_new_tokens=NEW), ())
  run(engine.prefill_chunk, slot, solo[1][0])
  run(engine.begin, slot)
  run(engine.decode)
  exported = engine.export_slot(slot)
  run(engine.reset_slot, slot)
  run(engine.reset_slot, run(engine.import_slot, exported))


def test_what_the_ranks_do_not_divide_is_refused_before_anything_is_allocated(directory, monkeypatch):
  monkeypatch.setattr(Engine, "restart", lambda self: pytest.fail("allocates"))
  layout = changed({}, **SIZES)
  with pytest.raises(InputError, match="slots=6 does not divide over 4 ranks; nearest that do: 4 or 8"):
    make_engine(directory, layout, slots=6)
  with pytest.raises(InputError, match="pages=3 does not divide over 4 ranks; nearest that do: 4$"):
    make_engine(directory, layout, pages=3)


def test_rows_and_latents_have_to_be_split_alike():
  layout = changed(
    {"activation_batch": ("data",), "cache_batch": ("fsdp",)}, data=2, fsdp=3, expert=1, tensor=1
  )
  with pytest.raises(ConfigError, match="into 2 parts and cache_batch into 3; to serve, one number has to"):
    ranks_of(layout, 6, 6)
