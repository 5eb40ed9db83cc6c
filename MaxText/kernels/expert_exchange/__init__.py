"""Rows of unequal number exchanged between all devices of a mesh axis, inside `shard_map`.

Dims: N devices of the axis, M rows sent, R rows of the receiving buffer, X what a row holds (any axes).
Source: the contract of `jax.lax.ragged_all_to_all`, with one slice for each device.
"""

from typing import Literal

import jax
from jaxtyping import Array, Int, Shaped

from MaxText.common.choices import record
from MaxText.common.errors import UnsupportedError
from MaxText.kernels.expert_exchange import gathered, native

__all__ = ["ExchangeImpl", "ragged_all_to_all"]

ExchangeImpl = Literal["auto", "native", "gathered"]

_IMPLEMENTATIONS = {"native": native, "gathered": gathered}


def ragged_all_to_all(
  x: Shaped[Array, "M *X"],
  out: Shaped[Array, "R *X"],
  input_offsets: Int[Array, "N"],
  send_sizes: Int[Array, "N"],
  output_offsets: Int[Array, "N"],
  recv_sizes: Int[Array, "N"],
  *,
  axis_name: str | tuple[str, ...],
  impl: ExchangeImpl = "auto",
) -> Shaped[Array, "R *X"]:
  """Sends one slice of rows to each device of the axis and places the slices that arrive.

  Differentiable in `x` and `out`. Slices that arrive must not overlap; a slice may be empty.

  Args:
    x: [M, *X] rows of this device.
    out: [R, *X] what stands where nothing arrives.
    input_offsets: [N] first row of the slice for each device.
    send_sizes: [N] rows of the slice for each device.
    output_offsets: [N] row of the *receiver's* `out` at which each slice begins.
    recv_sizes: [N] rows that arrive from each device.
    axis_name: the mesh axis, or several; the last of them counts fastest.
    impl: "native" is XLA's own collective, which XLA for CPU lacks; "gathered" sends everything to everyone
      and keeps what is meant for it; "auto" takes the former where there is one.

  Returns:
    [R, *X], `out` with the slices that arrived.

  Raises:
    UnsupportedError: `native` on a CPU, an unknown name, or not one slice a device.
  """
  on_cpu = _platform() == "cpu"
  if impl == "auto":
    impl = "gathered" if on_cpu else "native"
  if impl not in _IMPLEMENTATIONS:
    raise UnsupportedError(
      f"ragged_all_to_all: no implementation {impl!r}, there are {', '.join(_IMPLEMENTATIONS)}"
    )
  if impl == "native" and on_cpu:
    raise UnsupportedError(
      f"ragged_all_to_all: XLA for CPU has none, so native cannot exchange rows of shape {x.shape}; "
      "use gathered"
    )
  devices = jax.lax.axis_size(axis_name)
  if input_offsets.shape != (devices,):
    raise UnsupportedError(
      f"ragged_all_to_all: one slice a device, got {input_offsets.shape[0]} slices for {devices} devices"
    )
  record("ragged_all_to_all", impl)
  return _IMPLEMENTATIONS[impl].ragged_all_to_all(
    x, out, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name
  )


def _platform() -> str:
  """Platform of the devices that the surrounding `shard_map` runs on, which need not be this machine's."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform
