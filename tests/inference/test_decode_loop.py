"""The decode loop against the plain loop of its definition, on a toy decoder with the real call contract."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx

from MaxText.common.errors import CheckpointError
from MaxText.inference.decode_loop import DecodeLoop, bucket, cache_capacity, chunks, stop_array
from MaxText.inference.generate import MAX_BATCH, BatchRun, batches
from MaxText.inference.program import Program
from MaxText.inference.prompts import Request, Settings
from tests.inference.toy import VOCAB, ToyDecoder

PROMPTS = [[3], [5, 7, 9, 11, 2], list(range(1, 20)), [4] * 40]
CHUNK, CAPACITY, NEW = 16, 64, 12
GREEDY = Settings()


@functools.cache
def toy_loop():
  return DecodeLoop(ToyDecoder(), prefill_chunk=CHUNK, steps=5)


def answers(prompts, settings=GREEDY, stop_ids=(), limits=None, streams=False, loop=None):
  limits = limits or [NEW] * len(prompts)
  requests = [Request(f"prompt {i}", ids, limit) for i, (ids, limit) in enumerate(zip(prompts, limits))]
  run = BatchRun(loop or toy_loop(), requests, settings, stop_ids, capacity=CAPACITY, streams=streams)
  picked = np.concatenate(list(run), axis=1)
  return [[int(token) for token in row if token >= 0] for row in picked]


@functools.partial(jax.jit, static_argnums=0)
def next_token(graph, params, ids, length):
  logits, _ = nnx.merge(graph, params)(ids, None, (np.arange(ids.shape[1]) < length)[None].astype(np.int32))
  return logits[0, length - 1].argmax()


def greedy(decoder, prompt, count, stop_ids=()):
  """One token at a time through the whole sequence, without a cache."""
  ids = list(prompt)
  while count and not (len(ids) > len(prompt) and ids[-1] in stop_ids):
    padded = np.array([ids + [0] * (CAPACITY - len(ids))])
    ids.append(int(next_token(*nnx.split(decoder), padded, len(ids))))
    count -= 1
  return ids[len(prompt) :]


def test_unequal_prompts_in_chunks_give_the_tokens_of_the_plain_loop():
  decoder = ToyDecoder()
  assert answers(PROMPTS) == [greedy(decoder, prompt, NEW) for prompt in PROMPTS]


def test_a_row_of_a_batch_equals_the_row_alone_under_sampling():
  settings = Settings(temperature=1.0, top_k=9, top_p=0.9, seed=4)
  together = answers(PROMPTS, settings)
  assert [answers([prompt], settings)[0] for prompt in PROMPTS] == together
  assert answers(PROMPTS[::-1], settings) == together[::-1]
  assert answers(PROMPTS, Settings(temperature=1.0, seed=5)) != answers(PROMPTS, Settings(temperature=1.0))


def test_rows_end_at_their_own_stop_token_and_limit():
  decoder = ToyDecoder()
  free = [greedy(decoder, prompt, NEW) for prompt in PROMPTS]
  stop_ids = (free[1][3], free[2][5])
  limits = [1, NEW, NEW, 4]
  want = [greedy(decoder, prompt, limit, stop_ids) for prompt, limit in zip(PROMPTS, limits)]
  assert answers(PROMPTS, stop_ids=stop_ids, limits=limits) == want
  assert want[1][-1] in stop_ids


def test_a_stopped_row_leaves_its_cache_alone():
  loop = toy_loop()
  settings = BatchRun(loop, [Request("", [1], 1)] * 2, Settings(), (), capacity=CAPACITY)._sampling
  state = loop.prefill(PROMPTS[:2], [1, NEW], settings, (), capacity=CAPACITY)
  before = jax.tree.map(np.array, state.cache)
  _, state = loop.decode(state, settings, (), 5)
  after = jax.tree.map(np.array, state.cache)
  for name in before:
    np.testing.assert_array_equal(after[name][0], before[name][0])
  assert list(after["length"]) == [1, 5 + 5]


def test_nothing_compiles_for_lengths_settings_or_stop_ids():
  loop = DecodeLoop(ToyDecoder(), prefill_chunk=CHUNK, steps=5)
  answers(PROMPTS, loop=loop)
  count, seconds = loop.program_count, loop.compile_seconds
  assert count == 4  # start, one bucket of prefill, begin, decode
  for new, settings in ((2, Settings(top_k=3, temperature=0.5)), (7, Settings(seed=3)), (12, Settings())):
    answers(PROMPTS[::-1], settings, stop_ids=range(new % 8), limits=[new] * 4, loop=loop, streams=new == 7)
  assert (loop.program_count, loop.compile_seconds) == (count, seconds)


def test_the_state_is_donated():
  loop = toy_loop()
  settings = BatchRun(loop, [Request("", [1], 1)] * 2, Settings(), (), capacity=CAPACITY)._sampling
  first = loop.prefill(PROMPTS[:2], [NEW, NEW], settings, (), capacity=CAPACITY)
  loop.decode(first, settings, (), 5)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.cache))


def test_padding_rows_stay_silent():
  assert answers([[5, 7, 9, 11, 2], []], limits=[NEW, 1])[1] == []


def test_streaming_gives_the_same_tokens():
  assert answers(PROMPTS, streams=True) == answers(PROMPTS)


def test_a_nan_logit_stops_the_run_and_names_prompt_and_place():
  decoder = ToyDecoder()
  token = greedy(decoder, PROMPTS[1], 3)[2]
  decoder.embedding[...] = decoder.embedding[...].at[token].set(np.nan)
  with pytest.raises(CheckpointError, match="prompt 0: the logits of token 8 are NaN"):
    answers([PROMPTS[1]], loop=DecodeLoop(decoder, prefill_chunk=CHUNK, steps=5))


def test_logits_are_those_of_the_decoder():
  want, _ = ToyDecoder()(np.array([PROMPTS[2]]), None, np.ones((1, 19), np.int32))
  got = toy_loop().logits(PROMPTS[2])
  assert got.shape == (19, VOCAB) and got.dtype == np.float32
  np.testing.assert_allclose(got, want[0], rtol=1e-5, atol=1e-5)


def test_shapes_are_bucketed():
  assert [bucket(n, 512) for n in (1, 16, 17, 300, 512)] == [16, 16, 32, 512, 512]
  assert list(chunks(70, 32)) == [(0, 32), (32, 32), (64, 16)]
  assert [cache_capacity(70, n, 32) for n in (10, 200)] == [256, 512]
  assert [len(stop_array(range(n))) for n in (0, 8, 9)] == [8, 8, 16]
  assert [len(batch) for batch in batches(MAX_BATCH + 2)] == [33, 33]


def test_a_program_is_traced_in_the_thread_of_its_caller():
  threads = []

  def noted(params, x):
    threads.append(threading.get_ident())
    return params + x

  program = Program(noted)
  compile_program = program.job(np.float32(1), np.float32(2))()
  with ThreadPoolExecutor() as pool:
    pool.submit(compile_program).result()
  assert (float(program(np.float32(1), np.float32(2))), program.count) == (3, 1)
  assert threads == [threading.get_ident()]  # jax keeps its settings, such as the precision, by thread
