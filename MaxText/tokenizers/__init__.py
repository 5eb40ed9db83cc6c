"""Text to token ids and back.

`vocabulary.py` is the published file format, `kimi.py` the tokenizer, `stream.py` the decoder of a growing
answer, `training.py` makes the tiny model's vocabulary, `registry.py` is what the other rooms call.
A renderer of chat messages needs two things of a tokenizer: `encode`, always ordinary, and `special_id`.
"""
