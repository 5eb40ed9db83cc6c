"""Settings of every test: CPU, eight simulated devices, no network, and what runs only when asked for."""

import gc
import os
import sys

if "--accelerator" not in sys.argv:
  os.environ["JAX_PLATFORMS"] = "cpu"
# eight devices; and little of LLVM's time, as tests compile more than they run (XLA's own passes stay)
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
  ]
).strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# programs that are compiled once need no source lines, and traces are no garbage: a tenth of the time
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
gc.set_threshold(100_000, 20, 100)

import jax  # noqa: E402  (JAX reads the environment once)
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# modules whose annotated shapes and types are checked at every call
CHECKED = ("kernels.kda", "kernels.mla", "kernels.short_conv", "layers", "models")
ON_REQUEST = ("slow", "accelerator")

install_import_hook([f"MaxText.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture(scope="session")
def programs_directory(tmp_path_factory):
  """Where this run of the tests, with all its processes, keeps compiled programs."""
  root = tmp_path_factory.getbasetemp()
  return (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "programs"


@pytest.fixture(scope="module")
def kept_programs(programs_directory):
  """Keeps compiled programs on disk for a module that builds the same model several times."""
  jax.config.update("jax_compilation_cache_dir", str(programs_directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()


def pytest_addoption(parser):
  for name in ON_REQUEST:
    parser.addoption(f"--{name}", action="store_true", help=f"also run the tests marked '{name}'")


# the files that take longest; begun first, so that no process waits for another at the end
LONGEST = (
  "test_train_mesh",
  "test_train",
  "test_decode_cli",
  "test_laws",
  "test_many_devices",
  "test_sft",
  "test_parity_k3",
  "test_documents",
  "test_scheduler",
  "test_adapters",
  "test_serve",
  "test_engine_on_mesh",
  "test_engine",
)


def pytest_collection_modifyitems(config, items):
  items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
  for item in items:
    for name in ON_REQUEST:
      if item.get_closest_marker(name) and not config.getoption(f"--{name}"):
        item.add_marker(pytest.mark.skip(reason=f"marked '{name}'; runs with --{name}"))
