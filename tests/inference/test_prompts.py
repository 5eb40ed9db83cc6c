"""What a user asks for is checked before anything runs; every refusal names the place and the numbers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.common.errors import InputError
from MaxText.inference.prompts import Settings, check_length, encode, make_requests, read_prompts

VOCAB = 100


def test_ids_of_any_integer_type_pass():
  assert encode(np.array([1, 2], np.int32), None, VOCAB, "p") == [1, 2]
  assert encode((np.int64(3), 4), None, VOCAB, "p") == [3, 4]
  assert encode(jnp.array([5, 6]), None, VOCAB, "p") == [5, 6]


@pytest.mark.parametrize(
  "prompt, message",
  [
    ("", "p: empty prompt"),
    ([], "p: empty prompt"),
    ([5, 100], "p: token id 100: outside the vocabulary, expected 0 to 99"),
    ([-1], "p: token id -1: outside"),
    ([1.5], "p: token id 1.5: expected a whole number"),
    ([True], "p: token id True: expected a whole number"),
    (np.zeros((2, 3), int), "p: got ndarray, expected a flat sequence of token ids"),
    ({5, 7}, "p: got set, expected a flat sequence of token ids"),
    ("hello", "p: this model has no tokenizer"),
  ],
)
def test_prompts_that_cannot_be_served_are_refused(prompt, message):
  with pytest.raises(InputError, match=message):
    encode(prompt, None, VOCAB, "p")


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers():
  check_length([1] * 9, 10, "p")
  with pytest.raises(InputError, match="the prompt has 10 tokens, but the context holds 10"):
    check_length([1] * 10, 10, "p")


def test_an_answer_ends_with_the_context():
  [request] = make_requests([[1] * 7], Settings(max_new_tokens=64), None, VOCAB, context=10)
  assert request.limit == 3


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"temperature": -0.1}, "temperature: got -0.1, expected a number >= 0"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p: got 0, expected a number > 0 and <= 1"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2.5}, "top_k"),
    ({"seed": 2**32}, "seed: got 4294967296, expected a whole number from 0 to 4294967295"),
    ({"seed": -1}, "seed"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": True}, "max_new_tokens"),
    ({"stop_ids": (1, 100)}, "stop_ids: token id 100"),
    ({"min_p": 1.0}, "min_p: got 1.0, expected a number >= 0 and < 1"),
    ({"presence_penalty": 2.5}, "presence_penalty: got 2.5, expected a number from -2 to 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"logprobs": 21}, "logprobs: got 21, expected 0 to 20"),
  ],
)
def test_settings_out_of_range_are_refused(changes, message):
  with pytest.raises(InputError, match=message):
    Settings(**changes).check(VOCAB)


def test_a_text_file_holds_one_verbatim_prompt_a_line(tmp_path):
  path = tmp_path / "prompts.txt"
  path.write_bytes("def f(x):\n  tab\tand\x0cfeed  \n尼罗河\r\n".encode())
  assert read_prompts(path) == ["def f(x):", "  tab\tand\x0cfeed  ", "尼罗河"]
  path.write_bytes(b"\xef\xbb\xbfone\rprogress bar\r\ntwo")  # of an editor that marks its files
  assert read_prompts(path) == ["one\rprogress bar", "two"]


def test_a_jsonl_file_holds_strings_ids_and_objects(tmp_path):
  path = tmp_path / "prompts.jsonl"
  lines = ["two\nlines", [5, 7], {"prompt": "x"}, {"prompt_ids": [1], "note": "kept out"}]
  path.write_text("\n".join(map(json.dumps, lines)) + "\n")
  assert read_prompts(path) == ["two\nlines", [5, 7], "x", [1]]


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("p.txt", b"", "no prompts"),
    ("p.txt", b"a\n\nb\n", "p.txt:2: empty prompt"),
    ("p.txt", b"ok\xff", "not UTF-8 at byte 2"),
    ("p.jsonl", b'"a"\n{"prompt": "a"', "p.jsonl:2: not JSON"),
    ("p.jsonl", b"5\n", "p.jsonl:1: expected a string or a list of token ids"),
    ("p.jsonl", b'["a"]\n', "p.jsonl:1: expected a string or a list"),
    ("p.jsonl", b'{"prompt": "a", "prompt_ids": [1]}\n', "p.jsonl:1: expected one of the keys"),
    ("p.jsonl", b'{"promt": "a"}\n', "p.jsonl:1: expected one of the keys .* got promt"),
    ("p.jsonl", b"[]\n", "p.jsonl:1: empty prompt"),
  ],
)
def test_damaged_files_are_refused_with_the_line(tmp_path, name, content, message):
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(InputError, match=message):
    read_prompts(path)


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(InputError, match="no.txt: No such file"):
    read_prompts(tmp_path / "no.txt")
  with pytest.raises(InputError, match="directory"):
    read_prompts(tmp_path)
