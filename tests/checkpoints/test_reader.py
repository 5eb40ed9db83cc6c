"""Damaged directories: each defect is told by name in one line."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from MaxText.checkpoints.reader import open_published
from MaxText.common.errors import CheckpointError

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.uint8)


def refusal(directory):
  with pytest.raises(CheckpointError) as caught:
    open_published(directory)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def write_shards(directory, weight_map, **shards):
  for shard, found in shards.items():
    save_file(found, directory / f"{shard}.safetensors")
  (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_raw(path, header, data=b""):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_reads_what_the_library_writes(tmp_path):
  save_file({"a": A, "b": B}, tmp_path / "model.safetensors", metadata={"format": "pt"})
  files = open_published(tmp_path)
  np.testing.assert_array_equal(files.array("a"), A)
  np.testing.assert_array_equal(files.array("b"), B)
  assert files.metadata == {"format": "pt"} and files.bytes_by_dtype() == {"F32": 24, "U8": 4}
  assert not files.array("a").flags.writeable


def test_shards_are_one_checkpoint(tmp_path):
  write_shards(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": A}, y={"b": B})
  files = open_published(tmp_path)
  assert {name: entry.shard for name, entry in files.entries.items()} == {
    "a": "x.safetensors",
    "b": "y.safetensors",
  }
  np.testing.assert_array_equal(files.array("b"), B)


def test_vision_tensors_are_set_aside(tmp_path):
  save_file({"a": A, "vision_tower.x": B, "mm_projector.y": B}, tmp_path / "model.safetensors")
  files = open_published(tmp_path)
  assert list(files.entries) == ["a"] and sorted(files.skipped) == ["mm_projector.y", "vision_tower.x"]
  assert files.bytes_by_dtype() == {"F32": 24, "U8": 8}


def test_an_empty_tensor_is_read(tmp_path):
  save_file({"a": np.zeros((0, 3), np.float32)}, tmp_path / "model.safetensors")
  assert open_published(tmp_path).array("a").shape == (0, 3)


def test_no_directory(tmp_path):
  assert refusal(tmp_path / "x") == f"{tmp_path}/x: no such checkpoint directory"


def test_no_checkpoint(tmp_path):
  wanted = "holds neither model.safetensors nor model.safetensors.index.json"
  assert refusal(tmp_path) == f"{tmp_path}: {wanted}"


def test_missing_shard(tmp_path):
  write_shards(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": A})
  assert refusal(tmp_path) == (
    f"{tmp_path}: shard y.safetensors is missing; model.safetensors.index.json places 1 tensors in it"
  )


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path):
  write_shards(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"}, x={"a": A})
  assert refusal(tmp_path) == (
    f"{tmp_path}: model.safetensors.index.json places tensor b in x.safetensors, which does not hold it"
  )


def test_index_names_the_wrong_shard(tmp_path):
  write_shards(tmp_path, {"a": "y.safetensors", "b": "x.safetensors"}, x={"a": A}, y={"b": B})
  assert "places tensor a in y.safetensors, but it stands in x.safetensors" in refusal(tmp_path)


def test_shard_holds_a_tensor_that_the_index_lacks(tmp_path):
  write_shards(tmp_path, {"a": "x.safetensors"}, x={"a": A, "b": B})
  assert refusal(tmp_path) == (
    f"{tmp_path}: x.safetensors holds tensor b, which model.safetensors.index.json does not name"
  )


def test_tensor_in_two_shards(tmp_path):
  write_shards(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": A}, y={"a": A, "b": B})
  assert refusal(tmp_path) == f"{tmp_path}: tensor a stands in both x.safetensors and y.safetensors"


@pytest.mark.parametrize("content", [b"{", b'{"weight_map": []}', b"[]", b'{"weight_map": {"a": 1}}'])
def test_unusable_index(tmp_path, content):
  (tmp_path / "model.safetensors.index.json").write_bytes(content)
  assert "model.safetensors.index.json" in refusal(tmp_path)


def test_truncated_data(tmp_path):
  path = tmp_path / "model.safetensors"
  save_file({"a": A, "b": B}, path)
  size = path.stat().st_size
  path.write_bytes(path.read_bytes()[:-2])
  assert refusal(tmp_path) == (
    f"{path}: truncated: tensor b ends at byte {size}, but the file has {size - 2} bytes"
  )


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 2**60)])
def test_truncated_header(tmp_path, content):
  path = tmp_path / "model.safetensors"
  path.write_bytes(content)
  assert refusal(tmp_path) == (
    f"{path}: truncated or not safetensors: {len(content)} bytes do not hold the header"
  )


def tensor(start, end, dtype="F32", shape=(1,)):
  return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
  "header, message",
  [
    (b"not json", "header is not JSON"),
    (b"[1]", "header is not a JSON object"),
    (b'{"a": {"dtype": "U8"}}', "tensor a has an unreadable header entry {'dtype': 'U8'}"),
    (b'{"a": {}, "a": {}}', "tensor a stands twice in the header"),
    ({"a": tensor(0, 4, "F8_E4M3")}, "tensor a has type F8_E4M3, expected one of F32, BF16, F16, U8"),
    ({"a": tensor(0, 4, shape=(2,))}, "tensor a F32 [2] takes 8 bytes, but its range has 4"),
    ({"a": tensor(0, 4), "b": tensor(2, 6)}, "tensor b overlaps a"),
    ({"a": tensor(-4, 0)}, "tensor a starts inside the header"),
    ({"a": tensor(100, 104)}, "truncated: tensor a ends at byte"),
    ({"a": tensor("x", 4)}, "tensor a has an unreadable header entry"),
    ({"a": tensor(4, 8)}, "4 bytes before tensor a belong to none"),
    ({"a": tensor(0, 4)}, "4 bytes at the end belong to no tensor"),
  ],
)
def test_unreadable_header(tmp_path, header, message):
  write_raw(tmp_path / "model.safetensors", header, bytes(8))
  assert refusal(tmp_path).startswith(f"{tmp_path / 'model.safetensors'}: {message}")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
  path = tmp_path / "model.safetensors"
  save_file({"a": A}, path)

  def refuse(*_):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr(type(path), "open", refuse)
  assert refusal(tmp_path) == f"{path}: cannot be read: Permission denied"


def test_a_file_that_shrinks_under_the_reader(tmp_path):
  path = tmp_path / "model.safetensors"
  save_file({"a": np.zeros(4096, np.float32)}, path)
  files = open_published(tmp_path)
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(CheckpointError, match="cannot read tensor a"):
    files.array("a")
