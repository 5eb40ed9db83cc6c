"""How definitions compute."""

import ast
from collections.abc import Iterator

from tests.architecture.source import Source

MATMULS = {"einsum", "dot", "matmul", "tensordot", "vdot", "inner", "dot_general"}


def references_pin_precision(source: Source) -> Iterator[str]:
  """A definition never rounds its products: each matmul names its precision; `@`, which cannot, is absent."""
  if source.path.stem != "reference":
    return
  pinned = {
    id(target)
    for call in ast.walk(source.tree)
    if isinstance(call, ast.Call)
    and any("HIGHEST" in ast.unparse(k) for k in call.keywords if k.arg == "precision")
    for target in (call.func, *call.args)
  }
  for node in ast.walk(source.tree):
    loose = isinstance(node, ast.Attribute) and node.attr in MATMULS and id(node) not in pinned
    if loose or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
      yield f"{source.path}:{node.lineno}: {ast.unparse(node)} does not pin precision=HIGHEST"
