"""How tests compile that run many programs once each."""

import contextlib
from collections.abc import Iterator
from functools import partial

import jax
import pytest

# the same program with less time in LLVM: these tests compile many shapes and run each once
_QUICK = {"xla_backend_optimization_level": 0}
quick_jit = partial(jax.jit, compiler_options=_QUICK)


@contextlib.contextmanager
def compiling_quickly() -> Iterator[None]:
  """The same for what the package itself lowers and compiles inside the block."""
  usual = jax.stages.Lowered.compile
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.stages.Lowered, "compile", lambda self: usual(self, compiler_options=_QUICK))
    yield
