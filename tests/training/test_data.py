"""Documents from every kind of file, and the rows that they are packed into."""

import json

import numpy as np
import pytest

from MaxText.common.errors import CheckpointError, InputError

grain = pytest.importorskip("grain", reason="grain is not installed; pip install '.[train]' brings it")

from MaxText.training import data, documents  # noqa: E402

TEXTS = ["alpha", "the second, longer document\nof two lines", "c", "naïve 尼罗河", "e" * 150, "last one"]


class Bytes:
  """A tokenizer whose ids are the bytes plus one."""

  def encode(self, text):
    return [byte + 1 for byte in text.encode()]


END = 300


def batches(texts, batch=2, length=8, threads=0, seed=None, epochs=1, window=1):
  order = data.ordered(texts, seed, epochs, (0, 1)).map(data.Tokenized(Bytes(), END))
  identity = {"documents": len(texts), "seed": seed, "window": window, "length": length}
  rows = data.PackedRows(order, length, threads, identity)
  return data.shuffled_batches(rows, batch, window if seed is not None else 1, seed or 0)


def streams(texts):
  return [[*Bytes().encode(text), END] for text in texts if text]


def predicted(all_batches):
  """(input, target) pairs that count, in the order of training."""
  pairs = []
  for batch in all_batches:
    counts = batch["targets_segmentation"] != 0
    pairs += list(zip(batch["inputs"][counts].tolist(), batch["targets"][counts].tolist()))
  return pairs


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 63, 64, 65, 300])
def test_every_token_behind_another_of_its_document_is_predicted_once(length):
  want = [pair for ids in streams(TEXTS) for pair in zip(ids, ids[1:])]
  assert predicted(batches(TEXTS, length=length)) == want


def test_documents_of_one_two_and_three_tokens_keep_apart():
  texts = ["", "a", "bc", "", "d"]
  assert predicted(batches(texts, length=3)) == [(98, END), (99, 100), (100, END), (101, END)]


def test_segments_and_positions_begin_anew_at_each_document():
  (batch,) = list(batches(["ab", "cde"], batch=1, length=6))
  assert batch["inputs"].tolist() == [[98, 99, END, 100, 101, 102]]
  assert batch["inputs_segmentation"].tolist() == [[1, 1, 1, 2, 2, 2]]
  assert batch["inputs_position"].tolist() == [[0, 1, 2, 0, 1, 2]]
  assert batch["targets"].tolist() == [[99, END, 100, 101, 102, END]]
  assert batch["targets_segmentation"].tolist() == [[1, 1, 0, 2, 2, 2]]


def test_the_end_of_the_data_is_padded():
  last = list(batches(["abc"], batch=2, length=8))[-1]
  assert last["inputs_segmentation"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [0] * 8]
  assert last["targets_segmentation"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0] * 8]


def equal(a, b):
  return len(a) == len(b) and all(np.array_equal(x[key], y[key]) for x, y in zip(a, b) for key in x)


def test_threads_change_nothing():
  alone = list(batches(TEXTS, seed=3, epochs=3))
  assert equal(alone, list(batches(TEXTS, seed=3, epochs=3, threads=3)))
  assert not equal(alone, list(batches(TEXTS, seed=4, epochs=3)))


@pytest.mark.parametrize("stop", [1, 4, 9])
@pytest.mark.parametrize("threads, resumed_threads", [(0, 2), (3, 0)])
@pytest.mark.parametrize(
  "window", [1, 4, 5, 1000]
)  # a window that ends with a batch, inside one, and with the data
def test_a_stored_position_goes_on_exactly(stop, threads, resumed_threads, window):
  settings = dict(seed=1, epochs=2, window=window)
  whole = list(batches(TEXTS, **settings))
  first = iter(batches(TEXTS, threads=threads, **settings))
  for _ in range(stop):
    next(first)
  state = json.loads(json.dumps(first.get_state()))
  second = iter(batches(TEXTS, threads=resumed_threads, **settings))
  second.set_state(state)
  assert equal(list(second), whole[stop:])


def test_the_batch_size_may_change_on_the_way():
  rows = lambda found: [row for batch in found for row in batch["inputs"].tolist()]
  settings = dict(seed=1, epochs=2, window=5)
  first = iter(batches(TEXTS, batch=3, **settings))
  begun = rows([next(first), next(first)])
  second = iter(batches(TEXTS, batch=1, **settings))
  second.set_state(first.get_state())
  assert begun + rows(second) == rows(batches(TEXTS, batch=1, **settings))


class Words:
  """What packing asks of documents."""

  size = 3

  def __init__(self, texts):
    self._texts = texts

  def __len__(self):
    return len(self._texts)

  def __getitem__(self, number):
    return self._texts[number]


@pytest.mark.parametrize(
  "before, after, message",
  [
    ({"window": 4}, {"window": 1}, "grain_shuffle_buffer_size 4 then, 1 now"),
    ({"window": 1}, {"window": 4}, "grain_shuffle_buffer_size 1 then, 4 now"),
    ({}, {"length": 16}, "max_target_length 8 then, 16 now"),
    ({"seed": 3}, {"seed": None, "window": 4}, "seed 3 then, None now"),
  ],
)
def test_a_place_in_other_rows_or_another_order_is_refused(before, after, message):
  usual = dict(batch=2, length=8, seed=1)
  first, second = (
    iter(data.packed_documents(Words(TEXTS), Bytes(), END, **usual | keys)) for keys in (before, after)
  )
  next(first)
  with pytest.raises(CheckpointError, match=message):
    second.set_state(first.get_state())
  unshuffled = [
    iter(data.packed_documents(Words(TEXTS), Bytes(), END, **usual | {"seed": None, "window": n}))
    for n in (3, 9)
  ]
  unshuffled[1].set_state(unshuffled[0].get_state())  # what shuffles nothing may change


def test_the_largest_seed_shuffles_every_window():
  settings = dict(seed=2**32 - 1, epochs=2, window=2)
  assert len(predicted(batches(TEXTS, **settings))) == len(predicted(batches(TEXTS, epochs=2)))


@pytest.mark.parametrize("window", [2, 7, 1000])
def test_a_window_changes_the_order_of_rows_and_nothing_else(window):
  rows = lambda window: [
    *(
      tuple(row)
      for batch in batches(TEXTS, batch=1, seed=1, window=window)
      for row in batch["targets"].tolist()
    )
  ]
  plain, shuffled = rows(1), rows(window)
  assert shuffled != plain and sorted(shuffled) == sorted(plain)
  if window < len(plain):
    assert sorted(shuffled[:window]) == sorted(plain[:window])
  assert predicted(batches(TEXTS, seed=None, window=window)) == predicted(batches(TEXTS))


def test_each_epoch_has_every_document_in_another_order():
  order = data.ordered(TEXTS, 5, 2, (0, 1))
  epochs = [[order[i + 6 * epoch] for i in range(6)] for epoch in range(2)]
  assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(TEXTS)
  assert epochs[0] != epochs[1]


def test_processes_share_the_documents():
  parts = [[*data.ordered(TEXTS, 5, 1, (process, 3))] for process in range(3)]
  assert sorted(sum(parts, [])) == sorted(TEXTS)


def test_a_position_in_other_data_is_refused():
  state = iter(batches(TEXTS)).get_state()
  with pytest.raises(CheckpointError, match="other data: documents 6 then, 5 now"):
    iter(batches(TEXTS[:-1])).set_state(state)


def test_documents_without_text_end_the_search():
  with pytest.raises(InputError, match="no document of the training data has any text"):
    next(iter(batches(["", ""], epochs=None)))


# --- files --------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
  """The same texts as text files, jsonl, parquet and array-record."""
  from array_record.python.array_record_module import ArrayRecordWriter
  from pyarrow import parquet, table

  (tmp_path / "texts").mkdir()
  for i, text in enumerate(TEXTS):
    (tmp_path / "texts" / f"{i}.txt").write_text(text, encoding="utf-8")
  lines = "\n\n".join(json.dumps({"text": text, "n": 1}) for text in TEXTS)
  (tmp_path / "lines.jsonl").write_text(lines, encoding="utf-8")
  parquet.write_table(table({"text": TEXTS, "n": [1] * 6}), tmp_path / "rows.parquet", row_group_size=4)
  for name, form in RECORDS.items():
    writer = ArrayRecordWriter(str(tmp_path / f"{name}.array_record"), "group_size:1")
    for text in TEXTS:
      writer.write(form(text))
    writer.close()
  return tmp_path


def example(text):
  """A serialised tf.train.Example with the features n and text."""

  def field(number, content):
    assert len(content) < 1 << 14
    size = len(content)
    return bytes([number << 3 | 2, *((size,) if size < 128 else (size & 127 | 128, size >> 7))]) + content

  def entry(name, feature):
    return field(1, field(1, name) + field(2, feature))

  number = entry(b"n", field(3, field(1, b"\x01")))
  return field(1, number + entry(b"text", field(1, field(1, text.encode()))))


RECORDS = {
  "plain": str.encode,
  "objects": lambda text: json.dumps({"text": text}).encode(),
  "examples": example,
}


@pytest.mark.parametrize(
  "spec",
  ["texts", "texts/*.txt", "lines.jsonl", "rows.parquet", *(f"{name}.array_record" for name in RECORDS)],
)
def test_every_kind_of_file_gives_the_same_documents(files, spec):
  found = documents.find_documents("grain_train_files", str(files / spec), "text")
  assert [found[i] for i in range(len(found))] == TEXTS


def test_kinds_mix_in_the_order_of_their_names(files):
  found = documents.find_documents("grain_train_files", f"{files}/lines.jsonl, {files}/rows.parquet", "text")
  assert [found[i] for i in range(len(found))] == TEXTS * 2


def test_parquet_is_read_by_threads(files):
  found = documents.find_documents("grain_train_files", str(files / "rows.parquet"), "text")
  assert equal(list(batches(found, threads=4, seed=0)), list(batches(TEXTS, seed=0)))


@pytest.mark.parametrize(
  "content, spec, message",
  [
    ({}, "text.txt", r"text\.txt: no such file, directory or pattern"),
    ({"texts.txt": "a"}, "text.txt", r"no such file, directory or pattern, did you mean 'texts\.txt'\?"),
    ({"a.txt": ""}, "a.txt", r"a\.txt: the file is empty"),
    ({"a.txt": "", "b.txt": ""}, "*.txt", "all 2 files are empty"),
    ({"a.jsonl": "\n\n"}, "a.jsonl", "no document in 1 files"),
    ({"a.jsonl": '{"text": "x"}\n{broken'}, "a.jsonl", r"a\.jsonl:2: not JSON"),
    ({"a.jsonl": '{"texts": "x"}'}, "a.jsonl", r"a\.jsonl:1: no field 'text' .* did you mean 'texts'\?"),
    ({"a.jsonl": '{"text": 3}'}, "a.jsonl", r"a\.jsonl:1: text is int, expected text"),
    ({"a.parquet": "no parquet"}, "a.parquet", r"a\.parquet: unreadable as parquet"),
    ({"a.array_record": "none"}, "a.array_record", r"a\.array_record: unreadable as array-record"),
  ],
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, content, spec, message):
  for name, text in content.items():
    (tmp_path / name).write_text(text)
  with pytest.raises(InputError, match=message) as caught:
    found = documents.find_documents("grain_train_files", str(tmp_path / spec), "text")
    [found[i] for i in range(len(found))]
  assert "\n" not in str(caught.value)
  assert str(caught.value).startswith("grain_train_files: ")


def test_text_that_is_no_utf_8_is_named(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
  found = documents.find_documents("grain_train_files", str(tmp_path), "text")
  with pytest.raises(InputError, match=r"a\.txt: unreadable as UTF-8 text"):
    found[0]
