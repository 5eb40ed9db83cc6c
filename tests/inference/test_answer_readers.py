"""Stop strings, however the text is cut."""

from hypothesis import given
from hypothesis import strategies as st

from MaxText.inference.answer_readers import ChatReader, StopStrings
from MaxText.tokenizers.chat.events import ContentDelta, Finish, ReasoningDelta

texts = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def expected(text, strings):
  """The text before the stop string that is whole first."""
  ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in strings if stop in text]
  return text[: min(ends)[1]] if ends else text


@given(texts, stops, st.lists(st.integers(0, 12), max_size=6))
def test_any_cut_gives_the_same_text(text, strings, cuts):
  reader, bounds = StopStrings(strings), sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
  told = "".join(reader.push(text[a:b]) for a, b in zip(bounds, bounds[1:])) + reader.flush()
  assert told == expected(text, strings)
  assert reader.is_stopped == any(stop in text for stop in strings)


@given(texts, stops)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(text, strings):
  reader = StopStrings(strings)
  told = reader.push(text)
  if not reader.is_stopped:
    held = text[len(told) :]
    assert held == "" or any(stop.startswith(held) for stop in strings)


class Scripted:
  """A chat format whose answer is a list of events, one a token."""

  def __init__(self, events):
    self._events = list(events)

  def push(self, token):
    return [self._events[token]]

  def end(self, *, is_cut_off):
    return [Finish("length" if is_cut_off else "stop")]


def read(events, stop, reason="stop"):
  reader = ChatReader(Scripted(events), stop)
  told = []
  for token in range(len(events)):
    told += reader.push(token)
    if reader.is_stopped:
      break
  return told + list(reader.end(reason))


def test_only_the_visible_answer_is_searched():
  events = [ReasoningDelta("a STOP b"), ContentDelta("c ST"), ContentDelta("OP d")]
  assert read(events, ["STOP"]) == [ReasoningDelta("a STOP b"), ContentDelta("c "), Finish("stop")]


def test_what_was_held_back_comes_before_what_follows():
  events = [ContentDelta("c ST"), ReasoningDelta("x"), ContentDelta("ST")]
  assert read(events, ["STOP"], "length") == [
    ContentDelta("c "),
    ContentDelta("ST"),
    ReasoningDelta("x"),
    ContentDelta("ST"),
    Finish("length"),
  ]
