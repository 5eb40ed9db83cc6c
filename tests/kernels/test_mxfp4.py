"""MXFP4 bytes mean what the published layout says, and packing is the inverse of unpacking on their grid."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.kernels.mxfp4 import BLOCK, MxFp4, pack, unpack, unpack_halves
from tests.locations import OPS

FIXTURE = OPS / "mxfp4.npz"
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CODE_VALUES = np.concatenate([VALUES, -VALUES])
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))

unpack_compiled = jax.jit(lambda packed, scale, dtype: unpack(MxFp4(packed, scale), dtype), static_argnums=2)


def every_scale_and_code() -> MxFp4:
  """A weight [256, 32]: row s has scale s and the codes 0..15 twice, in order."""
  codes = np.tile(np.arange(16, dtype=np.uint8), 2)
  packed = np.broadcast_to(codes[0::2] | codes[1::2] << 4, (256, 16)).copy()
  return MxFp4(packed, np.arange(256, dtype=np.uint8)[:, None])


def first_block(byte: int, scale: int) -> list[float]:
  """Elements 0 and 1 of a block that starts with `byte`."""
  packed = np.zeros((1, 16), np.uint8)
  packed[0, 0] = byte
  return unpack(MxFp4(packed, np.array([[scale]], np.uint8)), np.float32)[0, :2].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "jit"])
def test_every_code_under_every_scale_is_exact_to_the_bit(compiled, dtype):
  w = every_scale_and_code()
  got = np.asarray(unpack_compiled(w.packed, w.scale, dtype) if compiled else unpack(w, dtype))
  with np.errstate(over="ignore"):
    want = (np.tile(CODE_VALUES, 2) * 2.0 ** (w.scale - 127.0)).astype(dtype)
  assert got.dtype == dtype
  bits = np.dtype(f"uint{8 * dtype.itemsize}")
  np.testing.assert_array_equal(got[:255].view(bits), want[:255].view(bits))
  assert np.isnan(got[255].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_checkpoint_bytes_give_the_recorded_values(dtype):
  if not FIXTURE.exists():
    pytest.skip(f"no fixture at {FIXTURE}")
  data = np.load(FIXTURE)
  got = unpack(MxFp4(data["packed"], data["scales"]), dtype)
  np.testing.assert_array_equal(got.astype(np.float32), data["expected"])
  repacked = pack(data["expected"])
  np.testing.assert_array_equal(unpack(repacked, np.float32), data["expected"])


@pytest.mark.parametrize(
  ("byte", "scale", "want"),
  [
    (0x16, 121, [0.0625, 0.0078125]),
    (0x21, 127, [0.5, 1.0]),
    (0x21, 134, [64.0, 128.0]),
    (0x21, 126, [0.25, 0.5]),
    (0x02, 134, [128.0, 0.0]),
    (0xF7, 127, [6.0, -6.0]),
  ],
)
def test_published_bytes(byte, scale, want):
  assert first_block(byte, scale) == want


def test_scale_byte_255_is_nan_and_never_infinite():
  assert np.isnan(first_block(0x77, 255)).all()


def test_codes_run_linearly_along_the_input_axis():
  codes = np.random.default_rng(0).permutation(np.tile(np.arange(16, dtype=np.uint8), 4)).reshape(1, 64)
  packed = codes[:, 0::2] | codes[:, 1::2] << 4
  got = unpack(MxFp4(packed, np.array([[127, 128]], np.uint8)), np.float32)
  np.testing.assert_array_equal(got, CODE_VALUES[codes] * np.repeat([1, 2], 32))


def test_halves_are_the_even_and_the_odd_channels():
  w = every_scale_and_code()
  values = unpack(w, np.float32)
  for half, offset in zip(jax.jit(unpack_halves)(w), (0, 1)):
    np.testing.assert_array_equal(
      np.asarray(half)[:255].view(np.uint32), values[:255, offset::2].view(np.uint32)
    )


def test_rounding_goes_to_the_nearest_code_and_ties_to_the_even_one():
  edges = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
  row = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 9), -edges, [4.0] * 4])
  got = unpack(pack(row[None].astype(np.float32)), np.float32)[0]
  even = [0, 1, 1, 2, 2, 4, 4]
  want = [*even, 0, 0.5, 1, 1.5, 2, 3, 4, 0.5, 1, 1.5, 2, 3, 4, 6, *[-v for v in even], 4, 4, 4, 4]
  assert got.tolist() == want


@pytest.mark.parametrize(
  ("largest", "byte"), [(1.0, 125), (1.7421875, 125), (1.75, 126), (6.0, 127), (7.0, 128), (0.0, 0)]
)
def test_scale_follows_the_rounded_largest_magnitude(largest, byte):
  row = np.zeros((1, BLOCK), np.float32)
  row[0, 5] = -largest
  assert pack(row).scale.tolist() == [[byte]]


def test_a_non_finite_weight_marks_its_block_only():
  row = np.ones((1, 3 * BLOCK), np.float32)
  row[0, 3], row[0, 40] = np.nan, np.inf
  got = unpack(pack(row), np.float32)[0]
  assert np.isnan(got[:64]).all() and (got[64:] == 1).all()


def test_an_input_axis_that_is_not_whole_blocks_is_refused():
  with pytest.raises(ValueError, match="not a multiple of 32"):
    pack(np.zeros((2, 48), np.float32))


def test_numpy_and_jax_pack_the_same_bytes():
  w = np.random.default_rng(1).standard_normal((2, 8, 96), dtype=np.float32)
  host, device = pack(w), jax.jit(pack)(jnp.asarray(w))
  assert isinstance(host.packed, np.ndarray) and isinstance(device.packed, jax.Array)
  np.testing.assert_array_equal(device.packed, host.packed)
  np.testing.assert_array_equal(device.scale, host.scale)
  assert host.shape == device.shape == w.shape


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=64, max_size=64), scales=st.lists(st.integers(0, 252), min_size=4, max_size=4))
def test_packing_what_was_unpacked_changes_no_value(data, scales):
  w = MxFp4(np.frombuffer(data, np.uint8).reshape(1, 64), np.array([scales], np.uint8))
  values = unpack(w, np.float32)
  np.testing.assert_array_equal(unpack(pack(values), np.float32).view(np.uint32), values.view(np.uint32))
