"""What the tests of the engine and of its scheduler share: shapes of a small K3, and engines of it."""

from MaxText.checkpoints.load import load_params
from MaxText.configs import loader
from MaxText.inference.engine import Engine

VOCAB, LONGEST, NEW = 64, 64, 9
SPECIAL = dict(bos_token_id=61, eos_token_id=62, pad_token_id=63)
# a dense layer, then two cycles of (MLA, KDA) for the scan to find
SHAPE = dict(num_hidden_layers=5, full_attn_layers=(2, 4), hidden_size=32, vocab_size=VOCAB)
LENGTHS = (1, 2, 8, 9, 15, 16, 17, 33, 40)
MARGIN = 1e-3  # a greedy choice closer than this may fall to rounding


def logits_after(model, prompt, answer):
  """Logits that each token of an answer was picked from; one shape, so one program, for all of them."""
  ids = prompt + answer
  return model.logits(ids + [0] * (LONGEST - len(ids)))[len(prompt) - 1 : len(ids) - 1]


def make_engine(directory, *, pages=24, page_size=8, steps=4, **overrides):
  cfg = loader.load(directory, [f"{key}={value}" for key, value in overrides.items()])
  decoder = load_params(directory, cfg, progress=False)
  shape = dict(slots=4, pages=pages, page_size=page_size, max_target_length=LONGEST)
  return Engine(decoder, **shape, prefill_chunk=16, steps=steps)
