"""Our engine in both contracts of JetStream: exact limits, contained failures, slots of its own."""

import logging
import threading
import time

import numpy as np
import pytest

from MaxText.common.errors import InputError, UnsupportedError
from MaxText.inference.jetstream_adapter import FAILED, NOT_FINITE, JetStreamTokenizer, engine_class
from MaxText.tokenizers.kimi import KimiTokenizer
from tests.inference import echo_engine
from tests.inference.echo_engine import STOP, EchoEngine
from tests.inference.jetstream_contract import NEW, OLD, Loop, contract
from tests.locations import TINY

TOKENIZER = KimiTokenizer.from_directory(TINY)
CONTRACTS = {"0.2.2": contract(OLD), "0.3.0": contract(NEW)}


@pytest.fixture(params=CONTRACTS)
def version(request):
  return request.param


@pytest.fixture
def engine():
  return EchoEngine()


def adapted(version, engine):
  return engine_class(CONTRACTS[version])(engine, TOKENIZER, (STOP,))


@pytest.fixture
def loop(version, engine):
  return Loop(adapted(version, engine), version == "0.3.0")


def whole(version, ids):
  """What a client has of an answer that ended by itself: only the later version tells the stop token."""
  return [*ids, STOP] if version == "0.3.0" else list(ids)


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_exactly_as_many_tokens_as_asked_for(loop, limit):
  request = loop.ask(range(9), limit)
  loop.run()
  assert request.told == list(range(limit))


def test_requests_of_unequal_length_come_and_go(loop, version, engine):
  """Five requests on two slots; each answer is its own."""
  asked = [(range(10 * n, 10 * n + length), 50) for n, length in enumerate((3, 9, 1, 20, 2))]
  requests = [loop.ask(*each) for each in asked]
  loop.run()
  assert [request.told for request in requests] == [whole(version, ids) for ids, _ in asked]
  assert engine.used == (0, 0) and engine.restarts == 0


def test_a_first_token_that_ends_the_answer_ends_the_request(loop, version, engine):
  request, other = loop.ask([echo_engine.SILENT], 9), loop.ask([4, 5], 9)
  loop.run()
  assert request.told == whole(version, []) and other.told == whole(version, [4, 5])
  assert engine.used == (0, 0)


def test_an_answer_ends_where_the_context_does(loop, engine):
  """64 tokens are held, the prompt takes 40 of them."""
  request = loop.ask(range(40), 1000)
  loop.run()
  assert request.told == list(range(24)) and engine.used == (0, 0)


def test_a_slot_whose_request_was_cut_off_goes_to_the_next(loop, engine):
  """JetStream does not say that a limit was reached; the next request takes the slot from the old one."""
  loop.ask(range(30), 2)
  loop.run()
  assert engine.used[0] == 1
  cut = [loop.ask(range(30), 2) for _ in range(6)]
  loop.run()
  assert all(each.told == [0, 1] for each in cut) and engine.used[0] <= 2


@pytest.mark.parametrize(
  "bad, told",
  [
    (echo_engine.PREFILL_FAILS, [FAILED]),
    (echo_engine.NOT_A_NUMBER, [echo_engine.NOT_A_NUMBER, NOT_FINITE]),
  ],
)
def test_a_failure_of_one_request_stays_with_it(loop, version, engine, bad, told):
  other = loop.ask([4, 5, 6], 9)
  request = loop.ask([bad, 1], 9)
  loop.run()
  assert request.told == told and other.told == whole(version, [4, 5, 6])
  assert engine.used == (0, 0) and engine.restarts == 0


@pytest.mark.parametrize("bad", ["DECODE_FAILS", "STATE_IS_LOST", "RESET_FAILS"])
def test_an_engine_that_fails_starts_again_without_what_it_held(loop, version, engine, bad):
  bad = getattr(echo_engine, bad)
  lost, waiting = [loop.ask([bad], 9), loop.ask([3] * 12, 9)], loop.ask([4, 5], 9)
  loop.run()
  for request in lost[bad == echo_engine.RESET_FAILS :]:
    assert request.told[-1] == FAILED and FAILED not in request.told[:-1]
  assert waiting.told == whole(version, [4, 5])
  assert engine.used == (0, 0) and engine.restarts == 1


def test_a_failure_is_told_whatever_the_limit(loop):
  request = loop.ask([echo_engine.PREFILL_FAILS], 0)
  loop.run()
  assert request.told == [FAILED]


@pytest.mark.parametrize(
  "ids, words", [([], "got 0 tokens, expected 1 to 63"), ([1] * 64, "got 64 tokens, expected 1 to 63")]
)
def test_a_prompt_that_cannot_be_held_is_refused_with_both_numbers(loop, version, ids, words, caplog):
  request, other = loop.ask(ids, 9), loop.ask([4], 9)
  with caplog.at_level(logging.WARNING):
    loop.run()
  assert request.told == [FAILED] and other.told == whole(version, [4])
  assert words in caplog.text and "Traceback" not in caplog.text


def prefilled(adapter, *args, **given):
  """What a client is told after `prefill`: of the earlier version, with the first step."""
  loop = Loop(adapter, adapter._tells_first_token)
  prefix = adapter.prefill(params=None, **given)
  if adapter._tells_first_token:
    return prefix[1].row(0)[0]
  loop.state = adapter.insert(prefix, loop.state, slot=0)
  return adapter.generate(None, loop.state)[1].row(0)[0]


def test_what_jetstream_has_cut_is_refused(version, engine):
  """JetStream keeps the end of a prompt that is too long, with the length that it had."""
  adapter = adapted(version, engine)
  assert prefilled(adapter, padded_tokens=np.arange(64), true_length=65) == FAILED


def test_a_prefix_cache_is_refused(version, engine):
  adapter = adapted(version, engine)
  given = dict(padded_tokens=np.arange(4), true_length=4)
  assert prefilled(adapter, **given, existing_prefix=object()) == FAILED
  assert prefilled(adapter, **given) == 0 and not adapter.use_chunked_prefill


def test_what_jetstream_cannot_have_is_refused_by_name(version, engine):
  adapter = adapted(version, engine)
  with pytest.raises(UnsupportedError, match="enable_model_warmup"):
    adapter.generate(None, adapter.init_decode_state())  # only a warm-up steps before anything is inserted
  with pytest.raises(UnsupportedError, match="several samples"):
    adapter.prefill_multisampling(params=None, num_samples=2)
  with pytest.raises(UnsupportedError, match="several samples"):
    adapter.bulk_insert(None, None, [0, 1])
  with pytest.raises(UnsupportedError, match="interleaved"):
    adapter.get_prefix_destination_sharding()


@pytest.mark.parametrize("context, padded, longest", [(9, 16, 8), (64, 64, 63), (5000, 8192, 4999)])
def test_the_longest_prompt_is_one_that_jetstream_can_pad(version, context, padded, longest):
  adapter = adapted(version, EchoEngine(max_target_length=context))
  assert (adapter.max_prefill_length, adapter.longest_prompt) == (padded, longest)
  adapter.check_prompt([1] * longest)
  with pytest.raises(InputError, match=f"got {longest + 1} tokens, expected 1 to {longest}"):
    adapter.check_prompt([1] * (longest + 1))


def test_jetstream_pads_no_further_than_32768(version):
  adapter = adapted(version, EchoEngine(max_target_length=100_000))
  assert (adapter.max_prefill_length, adapter.longest_prompt) == (32768, 32767)


def test_an_engine_without_pages_for_all_slots_is_refused():
  engine = EchoEngine()
  engine.resources.acquire(1)
  with pytest.raises(InputError, match="3 slots and 11 pages, expected at least 2 slots, with 4 pages each"):
    adapted("0.2.2", engine)


def test_the_contract_is_read_off_what_prefill_returns():
  """Versions between the two have the later result, before they have what else is new."""
  between = contract(OLD)
  assert not engine_class(between)._tells_first_token
  between.Engine.prefill.__annotations__["return"] = tuple[object, object]
  assert engine_class(between)._tells_first_token


def test_a_contract_that_asks_for_more_is_refused():
  with pytest.raises(UnsupportedError, match="asks for speculate; known are"):
    engine_class(contract((*NEW, "speculate")))


def test_a_prompt_that_waits_for_a_slot_is_let_go(version, engine):
  """Two answers and a prompt hold the slots; another prompt waits until the next insertion, or the end."""
  adapter, read = adapted(version, engine), []
  given = dict(params=None, padded_tokens=np.arange(8), true_length=8)
  prefixes = [adapter.prefill(**given) for _ in range(3)]
  prefixes = [prefix[0] if version == "0.3.0" else prefix for prefix in prefixes]
  for slot in (0, 1):
    adapter.insert(prefixes[slot], None, slot)
  threads = [threading.Thread(target=lambda: read.append(adapter.prefill(**given))) for _ in range(2)]
  for thread in threads:
    thread.start()
  time.sleep(0.05)
  assert not read
  adapter.insert(prefixes[2], None, 0)
  while not read:
    time.sleep(0.001)
  time.sleep(0.05)
  assert len(read) == 1
  adapter.close()
  for thread in threads:
    thread.join(5)
  assert len(read) == 2 and engine.used[0] == 3


def test_the_tokenizer_adds_nothing_and_cuts_nothing():
  tokenizer = JetStreamTokenizer(TOKENIZER, (STOP, 770))
  text = "<|open|>tools<|sep|> 尼罗河 😀" * 20
  ids, length = tokenizer.encode(text, is_bos=True, max_prefill_length=16, jax_padding=True)
  assert length == len(ids) and tokenizer.decode(ids.tolist()) == text
  assert not set(ids.tolist()) & set(range(TOKENIZER.vocab_size - 256, TOKENIZER.vocab_size))
  assert tokenizer.stop_tokens == {STOP, 770} and tokenizer.eos_id == STOP
  assert tokenizer.decode([FAILED]) == "" and tokenizer.bos_id < 0
