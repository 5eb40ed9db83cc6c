"""Ids that Moonshot's own release gives; needs the released vocabulary, which this project does not ship.

KIMI_TIKTOKEN_MODEL is the path of Kimi K3's `tiktoken.model`, with its `tokenizer_config.json` beside it.

Source: spec section 7.4 (chat); google-deepmind/simply@b5aec4a, kimi_k3_tokenizer_goldens.json (texts).
"""

import os
from pathlib import Path

import pytest

from MaxText.tokenizers.chat.formats import chat_format
from MaxText.tokenizers.chat.messages import read_conversation
from MaxText.tokenizers.chat.options import ChatOptions
from MaxText.tokenizers.registry import load_tokenizer

MODEL = os.environ.get("KIMI_TIKTOKEN_MODEL")
pytestmark = pytest.mark.skipif(
  not MODEL, reason="KIMI_TIKTOKEN_MODEL does not name the released tiktoken.model"
)

EFFORT = (
  "`thinking_effort` guides on how much to think in your thinking channel "
  "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
  "Now the system is invoked with `thinking_effort=max`."
)
# fmt: off
TEXTS = {
  "The quick brown fox jumps over the lazy dog.": [
    1008, 5072, 16331, 69275, 60062, 1312, 276, 29292, 7751, 13,
  ],
  "It's Bob's; they're here, we'll see, I'd go, you've won, don't.": [
    15881, 23396, 1048, 26, 19564, 2397, 11, 20944, 2050, 11, 20020, 970, 11, 19587, 3661, 11, 4536,
    13,
  ],
  "你好，世界！我是 Kimi K3。": [33845, 378, 2243, 856, 7808, 24980, 72, 1040, 18, 292],
  "Kimi K3 是 Moonshot AI 的模型 (moonshot).": [
    42, 30223, 1040, 18, 220, 330, 30218, 10065, 22572, 220, 269, 15662, 347, 115443, 10065, 1083,
  ],
  "def f(x: int) -> int:\n    if x > 10:\n        return x**2\n    return -x\n": [
    1166, 285, 3940, 25, 754, 8, 2949, 754, 777, 274, 581, 1288, 1677, 220, 795, 777, 337, 745,
    1288, 381, 17, 198, 274, 745, 635, 87, 198,
  ],
  '{"a":1,"b":[1,2,3],"c":{"d":null,"e":true}}': [
    8264, 64, 1289, 16, 2020, 65, 33991, 16, 11, 17, 11, 18, 24410, 66, 22849, 67, 1289, 6562, 2020,
    68, 1289, 4130, 5375,
  ],
  "0 7 42 1234 999999 3.14159 1e-9": [
    15, 220, 22, 220, 5512, 220, 6694, 19, 220, 11275, 11275, 220, 18, 13, 18702, 6276, 220, 16, 68,
    12, 24,
  ],
  "a  b\t\tc\n\n\nd \n  e   ": [64, 220, 291, 197, 2529, 3898, 67, 1420, 220, 350, 274],
  "literal <|open|> and <|end_of_msg|> and [BOS] here": [
    82319, 22652, 4454, 91, 29, 316, 22652, 517, 5118, 14222, 91, 29, 316, 793, 33, 4110, 60, 2397,
  ],
  "مرحبا بالعالم — שלום עולם": [
    40011, 7570, 4265, 1063, 47116, 5042, 52137, 4275, 37056, 84242, 33480, 38252, 34102,
  ],
  "# Title\n\n- item one\n- item two\n\n```python\nprint(\"hi\")\n```\n": [
    2, 26293, 382, 12, 2993, 1101, 198, 12, 2993, 2069, 382, 3251, 12644, 198, 2676, 758, 9663,
    2690, 11512,
  ],
  "cd /app && git diff --binary HEAD~1 > /tmp/x.patch; echo $?": [
    4622, 926, 1205, 1843, 19253, 5454, 2432, 36959, 62709, 93, 16, 1677, 926, 11524, 12387, 43965,
    26, 7814, 130793,
  ],
  "ab" * 64: [83663] * 32,
  EFFORT: [
    63, 130400, 123074, 470, 63, 28560, 418, 1632, 2455, 308, 2704, 306, 651, 9545, 8491, 347, 2976,
    3411, 276, 4503, 8491, 904, 9141, 4661, 3867, 1268, 1332, 5713, 1268, 50004, 5713, 1268, 19421,
    5713, 316, 1268, 5354, 16518, 10048, 276, 2403, 387, 42070, 472, 1268, 130400, 123074, 470,
    105281, 11369,
  ],
}
CHAT_IDS = [
  163587, 2778, 6244, 878, 14062, 1, 163589, 3900, 554, 13205, 13, 163588, 2778, 163589, 163586,
  163587, 2778, 6244, 878, 2482, 1, 163589, 19180, 163588, 2778, 163589, 163586,
  163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 12092, 163589,
]
# fmt: on
LONG = {
  "QUJDRA" * 5000: 19_999,
  " " * 30_000 + "end": 121,
  "word " * 6000: 6001,
  "word " * 100_000: 100_002,
}


@pytest.fixture(scope="module")
def released():
  return load_tokenizer(Path(MODEL).parent, vocab_size=163_840)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:16].encode("unicode_escape").decode())
def test_texts_have_the_released_ids(released, text):
  assert released.encode(text) == TEXTS[text]
  assert released.decode(TEXTS[text]) == text


def test_a_rendered_chat_has_the_released_ids(released):
  said = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello"}]
  chat, options = chat_format(released), ChatOptions(thinking=False)
  assert chat.render(read_conversation(said), options).ids == CHAT_IDS


@pytest.mark.parametrize("text, count", LONG.items(), ids=["letters", "spaces", "words", "many words"])
def test_long_texts_are_cut_as_released(released, text, count):
  assert len(released.encode(text)) == count


def test_answers_stop_at_both_ends(released):
  assert released.stop_ids == {163585, 163586}
