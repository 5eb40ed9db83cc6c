"""How a command compiles: programs stay on disk for the next start, and CPU loops are not unrolled.

Set before jax is imported, through the variables that jax and XLA read: a user's own setting always wins.
"""

import hashlib
import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

BACKEND_OPTIONS = "--xla_backend_extra_options"
DIRECTORY_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def keep_programs(environment: MutableMapping[str, str]) -> Path | None:
  """Points jax to a directory below the user's cache, one for each kind of processor.

  Programs for a CPU are machine code, and home directories are shared between machines.

  Args:
    environment: of the process, changed in place.

  Returns:
    the directory, or None when the user chose one or none can be written.
  """
  if DIRECTORY_VARIABLE in environment:
    return None
  home = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", ""), ".cache")
  directory = Path(home, "maxtext-kimi-k3", "programs", processor())
  if not directory.is_absolute():
    return None
  try:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
  except OSError:
    return None
  if not os.access(directory, os.W_OK):
    return None
  environment[DIRECTORY_VARIABLE] = str(directory)
  return directory


def compile_compactly(environment: MutableMapping[str, str]) -> None:
  """Tells XLA not to unroll the loops of CPU programs: a sixth less to compile, and no slower to run."""
  flags = environment.get("XLA_FLAGS", "")
  if BACKEND_OPTIONS not in flags:
    environment["XLA_FLAGS"] = f"{flags} {BACKEND_OPTIONS}=xla_cpu_disable_loop_unrolling".strip()


def processor() -> str:
  """Returns a name that differs where the instruction set does."""
  try:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
  except OSError:
    lines = [platform.processor(), platform.release()]
  traits = sorted(
    {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
  )
  digest = hashlib.sha256("\n".join(traits or lines).encode()).hexdigest()
  return f"{platform.machine()}-{digest[:12]}"
