"""Whether a model fits this machine, asked before anything of it is allocated."""

import os
from pathlib import Path

import jax

from MaxText.common.errors import InputError
from MaxText.configs import costs, counts
from MaxText.configs.schema import Config

_LENGTH_BYTES = 4
GIB = 2**30
_CGROUPS = (  # limit, use and statistics of a container, in versions 2 and 1 of Linux' control groups
  tuple(Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current", "memory.stat")),
  tuple(
    Path("/sys/fs/cgroup/memory") / name
    for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
  ),
)


def check_fits(
  cfg: Config, batch: int = 1, capacity: int = 1, beside: int = 0, devices: int | None = 1
) -> None:
  """Refuses a model that is larger than the memory of the devices that will hold it.

  Args:
    cfg: the model and the dtypes to hold.
    batch: rows that decode together.
    capacity: cache slots of each row.
    beside: bytes of what else is allocated.
    devices: how many of this host's devices hold it together; None for all.

  Raises:
    InputError: with what is needed and what there is.
  """
  weights, caches = weight_bytes(cfg), cache_bytes(cfg, batch, capacity) + beside
  held, place = available_bytes(devices)
  if weights + caches > held:
    raise InputError(
      f"{cfg.model_name}: too large for this machine: needs {_gib(weights + caches)} "
      f"({_gib(weights)} weights, {_gib(caches)} caches), available {_gib(held)} of {place}{_more(devices)}"
    )


def _more(devices: int | None) -> str:
  """What to say of devices that are there and would not be used; simulated ones share one memory."""
  there = jax.local_devices()
  if devices != 1 or len(there) == 1 or there[0].platform == "cpu":
    return ""
  return f"; mesh=NAME spreads it over {len(there)} devices"


def check_trains(cfg: Config, moments: int) -> None:
  """Refuses to train a model that is larger than the memory at hand; activations are not counted.

  Args:
    cfg: the model as it is trained; where it has adapters, they alone have gradients, which are not counted.
    moments: numbers that the optimizer keeps for each weight.

  Raises:
    InputError: with what is needed and what there is.
  """
  weights = weight_bytes(cfg)
  gradients = 0 if cfg.lora_rank else weights
  needed = weights + (1 + moments) * gradients
  here, place = available_bytes(None)
  held = here * jax.process_count()  # the other hosts of a slice have as much
  if needed > held:
    raise InputError(
      f"{cfg.model_name}: too large to train on this machine: needs {_gib(needed)} ({_gib(weights)} weights, "
      f"{_gib(gradients)} gradients, {_gib(moments * gradients)} optimizer moments), "
      f"available {_gib(held)} of {place}"
    )


def weight_bytes(cfg: Config) -> int:
  """Returns the bytes of the parameters as they stay in memory."""
  size = counts.count(cfg)
  item = costs.ITEM_BYTES[cfg.parameter_dtype]
  stored = size.bytes_by_dtype
  plain = stored.get("F32", 0) + stored.get("BF16", 0) // 2 * item
  if cfg.packs_experts:
    return plain + size.packed_expert_bytes
  return plain + int(size.packed_expert_bytes / costs.MXFP4_BYTES) * item


def cache_bytes(cfg: Config, batch: int, capacity: int) -> int:
  """Returns the bytes of the caches of `batch` rows of `capacity` slots: the layouts of `layers.cache`."""
  lengths = len(cfg.full_attn_layers) * _LENGTH_BYTES
  return batch * (costs.state_bytes(cfg) + capacity * costs.latent_bytes(cfg) + lengths)


def available_bytes(devices: int | None) -> tuple[int, str]:
  """Returns the bytes that devices of the default backend can still allocate, and what they are called.

  Args:
    devices: how many of this host's; None for all.
  """
  used = jax.local_devices()[:devices]
  if used[0].platform == "cpu":
    return host_bytes(), "host memory"  # of all simulated devices together
  stats = [device.memory_stats() or {} for device in used]
  free = sum(each.get("bytes_limit", 0) - each.get("bytes_in_use", 0) for each in stats)
  number = f"{len(used)} x " if len(used) > 1 else ""
  return free, f"{number}{used[0].device_kind} memory"


def host_bytes() -> int:
  """Returns the bytes of host memory that are free or can be freed, within the limit of a container."""
  limits = [free for files in _CGROUPS if (free := _container_bytes(*files)) is not None]
  lines = (line.split() for line in _read("/proc/meminfo").splitlines())
  available = [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
  if not available:  # no Linux: all that is installed is the best known bound
    available = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
  return min(available + limits)


def _container_bytes(limit: Path, used: Path, statistics: Path) -> int | None:
  """Returns what a container may still allocate, pages of files that can be dropped included."""
  limit_text, used_text = _read(limit).strip(), _read(used).strip()
  if not limit_text.isdigit():  # absent, or "max"
    return None
  words = (line.split() for line in _read(statistics).splitlines())
  droppable = sum(int(line[1]) for line in words if line[:1] == ["inactive_file"])
  return int(limit_text) - int(used_text or 0) + droppable


def _read(path: str | Path) -> str:
  try:
    return Path(path).read_text(encoding="ascii")
  except OSError:
    return ""


def _gib(count: int) -> str:
  return f"{count / GIB:,.1f} GiB"
