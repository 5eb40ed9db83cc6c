"""Text of an answer while it is being generated.

A token may end within a UTF-8 character: ids decoded one by one would show U+FFFD where the text has none.
"""

import codecs

from MaxText.tokenizers.kimi import KimiTokenizer


class StreamDecoder:
  """Decodes ids as they arrive; the joined pieces equal `tokenizer.decode` of all of them."""

  def __init__(self, tokenizer: KimiTokenizer, *, skip_special: bool = True):
    """Starts an empty stream.

    Args:
      tokenizer: gives the bytes of each id.
      skip_special: leave out control tokens; markers published with `special=false` stay.
    """
    self._tokenizer = tokenizer
    self._skip_special = skip_special
    self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

  def push(self, token: int) -> str:
    """Takes one id and returns the characters that it completes; bytes of an incomplete character wait.

    Raises:
      InputError: the id is not in the vocabulary.
    """
    return self._utf8.decode(self._tokenizer.decode_bytes([token], skip_special=self._skip_special))

  def flush(self) -> str:
    """Ends the stream: returns U+FFFD if it stopped within a character, else nothing."""
    rest = self._utf8.decode(b"", final=True)
    self._utf8.reset()
    return rest
