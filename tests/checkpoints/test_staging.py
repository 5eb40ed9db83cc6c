"""A directory appears whole, also where its name is a link, and the old one stays until then."""

import pytest

from MaxText.checkpoints.staging import staged
from MaxText.common.errors import CheckpointError


def write(target, overwrite=False):
  with staged(target, overwrite, 1) as folder:
    (folder / "new").write_text("x")


@pytest.mark.parametrize("content", [(), ("model.safetensors",)], ids=["empty", "full"])
def test_a_link_is_followed(tmp_path, content):
  (tmp_path / "disk").mkdir()
  for name in content:
    (tmp_path / "disk" / name).write_text("x")
  (tmp_path / "link").symlink_to("disk")
  write(tmp_path / "link", overwrite=True)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
  assert [path.name for path in (tmp_path / "link").iterdir()] == ["new"]


def test_the_old_directory_comes_back_when_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
  target = tmp_path / "out"
  target.mkdir()
  (target / "model.safetensors").write_text("x")
  rename = type(target).rename

  def fail_for_the_new_one(path, to):
    if "partial" in path.name:
      raise PermissionError(13, "Permission denied")
    return rename(path, to)

  monkeypatch.setattr(type(target), "rename", fail_for_the_new_one)
  with pytest.raises(CheckpointError, match="cannot be written"):
    write(target, overwrite=True)
  assert [path.name for path in tmp_path.iterdir()] == ["out"] and (target / "model.safetensors").exists()


def test_only_a_checkpoint_is_ever_replaced(tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  with pytest.raises(CheckpointError, match="holds no checkpoint, so overwrite=true does not replace it"):
    write(tmp_path, overwrite=True)
  assert (tmp_path / "thesis.tex").exists()
