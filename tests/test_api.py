"""`MaxText.from_pretrained`: logits, answers, and the same refusals as the command's."""

import jax.numpy as jnp
import numpy as np
import pytest

import MaxText
from MaxText.common.errors import ConfigError, InputError
from MaxText.inference.model import _as_list
from tests.reference.generator import k3_config_json, write_checkpoint

pytestmark = pytest.mark.usefixtures("kept_programs")  # models of one shape
PROMPT = [5, 7, 9, 11, 13]
VOCAB = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  special = dict(bos_token_id=61, eos_token_id=62, pad_token_id=63)
  config = k3_config_json(num_hidden_layers=2, full_attn_layers=(2,), vocab_size=VOCAB, **special)
  return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), config, seed=9)


@pytest.fixture(scope="module")
def model(directory):
  return MaxText.from_pretrained(directory)


def test_logits_predict_the_greedy_answers(model):
  answers = model.generate([PROMPT, np.array([3])], max_new_tokens=8, stop_ids=())
  assert [answer.prompt_ids for answer in answers] == [PROMPT, [3]]
  for answer in answers:
    logits = model.logits(answer.prompt_ids + answer.token_ids)
    start = len(answer.prompt_ids) - 1
    assert logits.shape == (start + 9, VOCAB) and logits.dtype == np.float32
    assert list(logits[start:-1].argmax(-1)) == answer.token_ids
    assert (answer.finish_reason, answer.text) == ("length", None)
  assert (answers[0].stats.prompts, answers[0].stats.prompt_tokens, answers[0].stats.new_tokens) == (2, 6, 16)


def test_logits_of_a_prefix_are_a_prefix_of_the_logits(model):
  np.testing.assert_allclose(
    model.logits(PROMPT[:3]), model.logits(np.array(PROMPT))[:3], rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize("prompt", ["text", [1, 2], (1, 2), np.array([1, 2])], ids=str)
def test_a_single_prompt_stands_for_a_list_of_one(prompt):
  assert _as_list(prompt)[0] is prompt
  assert _as_list([prompt, prompt])[1] is prompt


def test_arrays_and_single_ids_stand_where_lists_do(model):
  want = model.generate(PROMPT, max_new_tokens=4, stop_ids=[62])[0].token_ids
  for prompt in (np.array(PROMPT), jnp.array(PROMPT), jnp.array([PROMPT])):
    assert model.generate(prompt, max_new_tokens=4, stop_ids=62)[0].token_ids == want
  np.testing.assert_array_equal(model.logits(jnp.array(PROMPT)), model.logits(PROMPT))


def test_figures_name_the_programs_of_this_model_alone(directory, model):
  other = MaxText.from_pretrained(directory, kda_impl="reference")
  assert other.generate(PROMPT, max_new_tokens=2)[0].stats.implementations["kda"] == "reference"
  assert "reference" not in model.generate(PROMPT, max_new_tokens=2)[0].stats.implementations["kda"]


def test_the_answer_ends_at_the_end_of_text_id_of_the_model(model):
  assert model.stop_ids == (62,)


def test_overrides_are_keys_of_the_configuration(directory, model):
  other = MaxText.from_pretrained(
    directory, dtype="bfloat16", expert_weights="dequantized", scan_layers=False
  )
  assert (other.config.dtype, other.config.expert_weights) == ("bfloat16", "dequantized")
  assert model.config.dtype == "float32" and model.tokenizer is None
  with pytest.raises(ConfigError, match="did you mean 'scan_layers'"):
    MaxText.from_pretrained(directory, scan_layer=True)
  with pytest.raises(ConfigError, match="dtype"):
    MaxText.from_pretrained(directory, dtype="float16")


@pytest.mark.parametrize("call", ["generate", "logits"])
def test_what_cannot_be_served_is_refused(model, call):
  with pytest.raises(InputError, match="empty prompt|got none"):
    getattr(model, call)([])
  with pytest.raises(InputError, match="outside the vocabulary"):
    getattr(model, call)([VOCAB])
  with pytest.raises(InputError, match="4100 tokens, but the context holds"):
    getattr(model, call)([1] * 4100)
