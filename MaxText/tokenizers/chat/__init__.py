"""Chat messages to token ids, and the ids of an answer back to messages.

`messages.py` checks what a user sends, `options.py` what a request asks for; `xtml_render.py` and
`xtml_parse.py` are the format of Kimi K3, `kimi_k2_render.py` and `kimi_k2_parse.py` that of Kimi-Linear.
`segments.py` turns what a renderer says into ids, `pieces.py` turns ids into what a parser reads, `events.py`
is what it tells. `formats.py` chooses by the vocabulary and is what the other rooms call: training and
serving go through the same walk, so that a model is asked in exactly the form in which it was taught.
"""
