"""Compiled programs go below the user's cache, unless the user says otherwise or nothing can be written."""

from MaxText.inference.compile_cache import DIRECTORY_VARIABLE, compile_compactly, keep_programs, processor


def test_programs_lie_below_the_cache_of_the_user_by_processor(tmp_path):
  for environment in ({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, {"HOME": str(tmp_path)}):
    directory = keep_programs(environment)
    assert environment[DIRECTORY_VARIABLE] == str(directory)
    assert directory.is_dir() and directory.name == processor()
    assert directory.is_relative_to(tmp_path)


def test_a_directory_that_the_user_set_stays(tmp_path):
  environment = {DIRECTORY_VARIABLE: "elsewhere", "HOME": str(tmp_path)}
  assert keep_programs(environment) is None
  assert environment[DIRECTORY_VARIABLE] == "elsewhere" and not list(tmp_path.iterdir())


def test_without_a_place_nothing_is_set(tmp_path):
  (tmp_path / "file").touch()
  for environment in ({}, {"HOME": str(tmp_path / "file")}):
    before = dict(environment)
    assert keep_programs(environment) is None
    assert environment == before


def test_flags_of_the_user_stay():
  environment = {"XLA_FLAGS": "--xla_dump_to=x"}
  compile_compactly(environment)
  assert environment["XLA_FLAGS"].startswith("--xla_dump_to=x --xla_backend_extra_options=")
  before = dict(environment)
  compile_compactly(environment)
  assert environment == before
