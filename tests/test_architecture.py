"""The rules of docs/architecture.md, read off the syntax trees; each is also shown a source that breaks it.

A rule takes one source and yields its violations; `RULES` says where each rule holds. They live in
`tests/architecture/`.
"""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from tests.architecture.docstrings import (
  arrays_state_their_shape,
  shapes_agree,
  the_public_is_annotated,
  the_public_is_documented,
)
from tests.architecture.imports import (
  ARROWS,
  EXTRAS,
  import_names,
  imports_point_down,
  only_the_loader_reads_yaml,
  project,
  third_parties_are_declared,
)
from tests.architecture.numerics import references_pin_precision
from tests.architecture.source import ROOT, Source, sources
from tests.architecture.text import names_are_bound, names_are_nouns, nothing_is_left_open, sizes_are_bounded

Rule = Callable[[Source], Iterator[str]]
PACKAGE, EVERYTHING = ("MaxText",), ("MaxText", "tests", "benchmarks", "scripts")
NUMERICAL = ("MaxText/kernels", "MaxText/layers", "MaxText/models", "MaxText/inference")
RULES: dict[Rule, tuple[str, ...]] = {
  imports_point_down: PACKAGE,
  third_parties_are_declared: PACKAGE,
  only_the_loader_reads_yaml: PACKAGE,
  names_are_nouns: EVERYTHING,
  sizes_are_bounded: EVERYTHING,
  nothing_is_left_open: EVERYTHING,
  names_are_bound: EVERYTHING,
  the_public_is_documented: PACKAGE,
  the_public_is_annotated: PACKAGE,
  shapes_agree: EVERYTHING,
  arrays_state_their_shape: NUMERICAL,
  references_pin_precision: ("MaxText/kernels",),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(rule):
  violations = [line for folder in RULES[rule] for source in sources(folder) for line in rule(source)]
  assert not violations, f"{rule.__doc__}\n" + "\n".join(violations)


LONG = "def f():\n" + "  x = 0\n" * 60
VIOLATIONS = [
  (imports_point_down, "MaxText/layers/mlp.py", "from MaxText.models.kimi_k3 import KimiDecoder"),
  (imports_point_down, "MaxText/kernels/kda/step.py", "def f():\n  import MaxText.configs.schema"),
  (imports_point_down, "MaxText/kernels/kda/step.py", "from ...layers import cache"),
  (imports_point_down, "MaxText/models/registry.py", "from MaxText import decode"),
  (imports_point_down, "MaxText/models/registry.py", "import MaxText"),
  (imports_point_down, "MaxText/inference/engine.py", "from MaxText.training import loop"),
  (imports_point_down, "MaxText/layers/mlp.py", "from MaxText.configs import loader"),
  (third_parties_are_declared, "MaxText/decode.py", "def f():\n  import torch"),
  (
    third_parties_are_declared,
    "MaxText/models/registry.py",
    "import importlib\nimportlib.import_module('maxtext')",
  ),
  (third_parties_are_declared, "MaxText/training/sft.py", "from transformers import AutoModel"),
  (third_parties_are_declared, "MaxText/inference/scheduler.py", "import prometheus_client"),
  (third_parties_are_declared, "MaxText/inference/openai_server.py", "import maxtext"),
  (third_parties_are_declared, "MaxText/inference/jetstream_adapter.py", "from jetstream.engine import x"),
  (only_the_loader_reads_yaml, "MaxText/configs/loader.py", "import yaml"),
  (only_the_loader_reads_yaml, "MaxText/configs/published.py", "yaml_text.parse(text, 'a')"),
  (names_are_nouns, "MaxText/layers/utils.py", ""),
  (names_are_nouns, "MaxText/helpers/mlp.py", ""),
  (sizes_are_bounded, "MaxText/layers/mlp.py", LONG),
  (sizes_are_bounded, "MaxText/kernels/kda/pallas_step.py", LONG),
  (
    sizes_are_bounded,
    "MaxText/kernels/kda/pallas_step.py",
    LONG.replace("f()", "f_kernel()") + "  x = 0\n" * 90,
  ),
  (sizes_are_bounded, "tests/test_mlp.py", "x = 0\n" * 601),
  (nothing_is_left_open, "MaxText/layers/mlp.py", "x = 0  # TODO: faster"),
  (nothing_is_left_open, "MaxText/layers/mlp.py", "from __future__ import annotations"),
  (names_are_bound, "MaxText/layers/mlp.py", "def f():\n  return jnp.zeros(3)"),
  (names_are_bound, "MaxText/layers/mlp.py", "x: Int = 0"),
  (the_public_is_documented, "MaxText/layers/mlp.py", "x = 0"),
  (the_public_is_documented, "MaxText/layers/mlp.py", '"""Doc."""\ndef f(): pass'),
  (
    the_public_is_documented,
    "MaxText/layers/mlp.py",
    '"""D."""\nclass C:\n  """D."""\n  def __call__(self): pass',
  ),
  (the_public_is_annotated, "MaxText/layers/mlp.py", "def f(x) -> int: pass"),
  (the_public_is_annotated, "MaxText/layers/mlp.py", "def f(x: int): pass"),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'def f(x: Float[Array, "B T"]):\n  """Args:\n  x: [T, B] thing."""',
  ),
  (shapes_agree, "MaxText/layers/mlp.py", 'class C:\n  """Attributes:\n  x: [B]"""\n  x: Int[Array, "B T"]'),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'def f() -> Float[Array, "B T"]:\n  """F.\n\n  Returns:\n    out [B, T] and n [T].\n  """',
  ),
  (
    arrays_state_their_shape,
    "MaxText/layers/mlp.py",
    'def f(x: Float[Array, "B T"]):\n  """Args:\n  x: a thing."""',
  ),
  (references_pin_precision, "MaxText/kernels/kda/reference.py", "jnp.einsum('ij,j->i', a, b)"),
  (
    references_pin_precision,
    "MaxText/kernels/kda/reference.py",
    "jnp.einsum('ij,j->i', a, b, precision=None)",
  ),
  (references_pin_precision, "MaxText/kernels/kda/reference.py", "a @ b"),
  (references_pin_precision, "MaxText/kernels/kda/reference.py", "f = partial(jnp.dot)"),
]
ACCEPTED = [
  (
    imports_point_down,
    "MaxText/layers/mlp.py",
    "from MaxText.configs.schema import Config\nfrom . import situ",
  ),
  (imports_point_down, "MaxText/decode.py", "from MaxText.inference import engine"),
  (third_parties_are_declared, "MaxText/training/compat.py", "import maxtext"),
  (third_parties_are_declared, "MaxText/inference/metrics.py", "import prometheus_client"),
  (only_the_loader_reads_yaml, "MaxText/configs/loader.py", "yaml_text.parse(text, 'a')"),
  (
    sizes_are_bounded,
    "MaxText/layers/mlp.py",
    LONG.replace("f():\n", 'f():\n  """Doc."""\n').replace("  x = 0\n", "", 1),
  ),
  (sizes_are_bounded, "MaxText/kernels/kda/pallas_step.py", LONG.replace("f()", "f_kernel()")),
  (
    names_are_bound,
    "MaxText/layers/mlp.py",
    "def f[T](x: T, y: 'B T') -> T:\n  return [g for g in x if len(g)]",
  ),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'def f(x: Float[Array, "*C B R+P"]):\n  """Args:\n  x: [B, R + P] thing."""',
  ),
  (shapes_agree, "MaxText/layers/mlp.py", 'def f(x: Float[Array, "B W 3"]):\n  """Takes x [B, W-1, 3]."""'),
  (
    shapes_agree,
    "MaxText/layers/mlp.py",
    'class C:\n  """Attributes:\n  x: [B, K/2]"""\n  x: Int[Array, "B half"]',
  ),
  (
    references_pin_precision,
    "MaxText/kernels/kda/reference.py",
    "f = partial(jnp.einsum, precision=Precision.HIGHEST)",
  ),
  (
    references_pin_precision,
    "MaxText/kernels/kda/reference.py",
    "jnp.dot(a, b, precision=lax.Precision.HIGHEST)",
  ),
  (references_pin_precision, "MaxText/kernels/kda/chunked.py", "a @ b"),
]


@pytest.mark.parametrize("rule, path, text", VIOLATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_violation_is_found(rule, path, text):
  assert list(rule(Source.of(path, text)))


@pytest.mark.parametrize("rule, path, text", ACCEPTED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_a_rule_allows_passes(rule, path, text):
  assert not list(rule(Source.of(path, text)))


def test_every_rule_is_shown_a_violation():
  assert {rule for rule, *_ in VIOLATIONS} == set(RULES)


def test_what_a_file_may_import_beside_the_core_is_in_an_extra():
  extras = set().union(*map(import_names, project()["optional-dependencies"].values()))
  assert set().union(*EXTRAS.values()) <= extras


def test_every_room_has_its_arrows():
  rooms = {path.parent.name for path in (ROOT / "MaxText").glob("*/__init__.py")}
  assert rooms <= set(ARROWS)


def test_importing_the_decoder_is_light():
  """At most 3 s of processor time, and none of the packages that training or a peer would bring."""
  program = """
    import sys, time
    import MaxText.decode
    heavy = {"maxtext", "torch", "tensorflow", "transformers"} & set(sys.modules)
    print(time.process_time(), *heavy)
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  seconds, *heavy = done.stdout.split()
  assert not heavy
  assert float(seconds) <= 3.0
