"""How the operator tests compile."""

from functools import partial

import jax

# the same program with less time in LLVM: these tests compile many shapes and run each once
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
