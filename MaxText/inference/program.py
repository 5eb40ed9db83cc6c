"""Compiled programs: each set of shapes is compiled once, by hand, before it runs.

That keeps the compile time out of every other figure, and nothing can recompile unseen.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from flax import nnx

from MaxText.common import choices
from MaxText.models.sharding import Layout, settle

Trace = Callable[[], Callable[[], None]]
Settled = Callable[[Layout | None, Any], Any]


class Program:
  """A function of (parameters, arrays...), compiled by hand for each set of shapes before it runs.

  That keeps the compile time out of every other figure, and nothing can recompile unseen.
  """

  def __init__(
    self,
    function: Callable,
    *,
    donates: bool = False,
    layout: Layout | None = None,
    settled: Settled = settle,
  ):
    """Wraps `function`.

    Args:
      function: of parameters, arrays and static numbers.
      donates: its first argument after the parameters is consumed by a call.
      layout: of the devices that it runs on, or None for one.
      settled: fixes the layout of what it leaves.
    """
    self._function = function
    self._settled = settled
    self._donates = donates
    self._layout = layout
    self._compiled: dict[tuple, jax.stages.Compiled] = {}

  @property
  def count(self) -> int:
    """Programs compiled so far."""
    return len(self._compiled)

  def job(self, params: Any, *arrays: Any, **static: int) -> Callable[[], Callable[[], None]] | None:
    """Returns what traces the program for these shapes, or None when it is compiled already.

    Tracing has to happen in the thread of the caller, whose jax settings it follows; it returns what
    compiles the program, in any thread.
    """
    key, tree, donated, kept = self._split(arrays, static)
    if key in self._compiled:
      return None
    donated, kept = ([self._abstract(x) for x in leaves] for leaves in (donated, kept))

    def flat(params, donated, kept):
      out = self._function(params, *jax.tree.unflatten(tree, donated + kept), **static)
      return self._settled(self._layout, out)

    def trace() -> Callable[[], None]:
      lowered = jax.jit(flat, donate_argnums=1).lower(params, donated, kept)

      def compile_program() -> None:
        self._compiled[key] = lowered.compile()

      return compile_program

    return trace

  def _abstract(self, x: Any) -> jax.ShapeDtypeStruct:
    """What a program is compiled for; on many devices, what lies on them already stays where it is."""
    sharding = None if self._layout is None else getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  def __call__(self, params: Any, *arrays: Any, **static: int) -> Any:
    """Runs the program of these shapes and static values, which has to be compiled."""
    key, _, donated, kept = self._split(arrays, static)
    return self._compiled[key](params, donated, kept)

  def _split(self, arrays: tuple, static: dict[str, int]) -> tuple[tuple, Any, list, list]:
    """Returns (what identifies the program, tree of the arrays, leaves to donate, other leaves)."""
    leaves, tree = jax.tree.flatten(arrays)
    donated = len(jax.tree.leaves(arrays[0])) if self._donates else 0
    key = (tree, *(leaf.shape for leaf in leaves), *static.items())
    return key, tree, leaves[:donated], leaves[donated:]


class Programs:
  """The programs of one decoder, and what compiling them took.

  Attributes:
    params: the decoder's parameters, an argument of every program.
    layout: how the decoder lies on many devices, or None for one.
    compile_seconds: time spent on tracing and compiling so far.
    implementations: operation -> implementations that the programs so far were traced with.
  """

  def __init__(self, decoder: nnx.Module):
    """Splits `decoder` into its graph and its parameters; compiles nothing."""
    self._graph, self.params = nnx.split(decoder)
    self.layout: Layout | None = getattr(decoder, "layout", None)
    self._programs: list[Program] = []
    self.compile_seconds = 0.0
    self.implementations: choices.Choices = {}

  def program(self, method: Callable, *, donates: bool = False, settled: Settled = settle) -> Program:
    """Returns `method(decoder, arrays...)` as a program; with `donates`, it consumes its first array tree."""
    made = Program(
      lambda params, *rest, **kw: method(nnx.merge(self._graph, params), *rest, **kw),
      donates=donates,
      layout=self.layout,
      settled=settled,
    )
    self._programs.append(made)
    return made

  @property
  def count(self) -> int:
    """Programs compiled so far."""
    return sum(program.count for program in self._programs)

  def compile(self, *jobs: Trace | None) -> None:
    """Compiles side by side what is not compiled yet: one program keeps little more than a core busy."""
    wanted = [job for job in jobs if job is not None]
    if wanted:
      started = time.perf_counter()
      with ThreadPoolExecutor() as pool, choices.collect(self.implementations):
        for done in [pool.submit(trace()) for trace in wanted]:
          done.result()
      self.compile_seconds += time.perf_counter() - started

  def run(self, program: Program, *arrays: Any, **static: int) -> Any:
    """Runs a program, compiled first where that is not done yet."""
    self.compile(program.job(self.params, *arrays, **static))
    return program(self.params, *arrays, **static)
