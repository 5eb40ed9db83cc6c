"""The vocabulary decides the format."""

import pytest

from MaxText.common.errors import InputError
from MaxText.tokenizers.chat.events import answer_of
from MaxText.tokenizers.chat.formats import KimiK2Format, XtmlFormat, chat_format
from MaxText.tokenizers.chat.messages import read_conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.kimi import KimiTokenizer
from MaxText.tokenizers.training import BYTES
from MaxText.tokenizers.vocabulary import SpecialTokens
from tests.tokenizers.chat.samples import MESSAGES


def test_the_markers_choose_the_format(tokenizer, linear_tokenizer):
  assert isinstance(chat_format(tokenizer), XtmlFormat)
  assert isinstance(chat_format(linear_tokenizer), KimiK2Format)
  assert chat_format(tokenizer).has_thinking and not chat_format(linear_tokenizer).has_thinking


def test_a_vocabulary_without_markers_cannot_chat():
  ranks = {token: rank for rank, token in enumerate(BYTES)}
  bare = KimiTokenizer(ranks, SpecialTokens({"<|open|>": 256}, frozenset(), frozenset()))
  with pytest.raises(
    InputError, match=r"without a chat format: kimi_k3 lacks <\|close\|>, .*; kimi_k2 lacks <\|im"
  ):
    chat_format(bare)


@pytest.mark.parametrize("thinking", [False, True])
def test_each_format_reads_what_it_writes(tokenizer, linear_tokenizer, thinking):
  options = ChatOptions(thinking=thinking, generation_prompt=False)
  for kind, said in ((tokenizer, {"reasoning_content": "why"} if thinking else {}), (linear_tokenizer, {})):
    message = {"role": "assistant", "content": "尼罗河 😀 naïve", **said}
    chat = chat_format(kind)
    rendered = chat.render(read_conversation([MESSAGES[1], message]), options)
    ids = [token for token, is_output in zip(rendered.ids, rendered.is_output) if is_output]
    by_id, by_text = chat.read_ids(options), chat.read_text(options)
    for stream, items in ((by_id, ids), (by_text, kind.decode(ids))):
      events = [event for item in items for event in stream.push(item)]
      answer = answer_of(events + stream.end(is_cut_off=False))
      assert answer.openai() == message
      assert "\ufffd" not in answer.content
