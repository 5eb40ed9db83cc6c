"""A run that trained through the MXFP4 grid, to the directory that others read, and back."""

import json

import jax
import numpy as np
import pytest

import MaxText
from MaxText import convert
from MaxText.checkpoints.layout import ParameterTree
from MaxText.checkpoints.load import load_params
from MaxText.configs import loader
from MaxText.train import main

pytestmark = [
  pytest.mark.train,
  pytest.mark.slow,  # a training program, and three models to decode with
]

SMALL = "base_num_decoder_layers=4 full_attn_layers=[4] attn_res_block_size=2 base_emb_dim=32".split()
STEPS = (
  "steps=6 max_target_length=32 learning_rate=0.01 mxfp4_qat=true mesh=fsdp ici_fsdp_parallelism=1".split()
)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
  """The run, its export, and what the export became again."""
  root = tmp_path_factory.mktemp("qat")
  (root / "lines.jsonl").write_text("\n".join(json.dumps({"text": "word " * n}) for n in range(1, 40)))
  data = [f"grain_train_files={root}/lines.jsonl", f"base_output_directory={root}", "run_name=run"]
  assert main(["kimi-k3-tiny", *SMALL, *STEPS, *data]) == 0
  assert convert.main([str(root / "run"), str(root / "export"), "expert_weights=packed"]) == 0
  assert convert.main([str(root / "export"), str(root / "orbax")]) == 0
  assert convert.main([str(root / "orbax"), str(root / "again")]) == 0
  return root


def tensors(directory):
  return {path.name: path.read_bytes() for path in directory.glob("*.safetensors*")}


def values(path, *overrides):
  cfg = loader.load(path, overrides)
  return cfg, ParameterTree(load_params(path, cfg, progress=False)).values


def test_experts_left_the_grid_in_training(places):
  cfg, tree = values(places / "run")
  assert cfg.mxfp4_qat
  experts = [value for path, value in tree.items() if ".experts.w1" in path]
  assert experts and all(value.dtype == np.float32 for value in experts)
  mantissas = np.unique(np.abs(np.frexp(np.asarray(experts[0]))[0]))
  assert mantissas.size > 100  # MXFP4 has eight magnitudes a block, of four mantissas


def test_the_export_decodes_as_the_run_computes(places):
  run, export = (MaxText.from_pretrained(str(places / name), dtype="float32") for name in ("run", "export"))
  ids = run.tokenizer.encode("word word word word word")
  expected, got = run.logits(ids), export.logits(ids)
  np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * float(np.abs(expected).max()))
  answers = [
    model.generate(["word word"], max_new_tokens=8, stop_ids=[])[0].token_ids for model in (run, export)
  ]
  assert answers[0] == answers[1] and len(answers[0]) == 8


def test_the_export_comes_back_with_its_bytes(places):
  assert tensors(places / "export") == tensors(places / "again") != {}


def test_a_run_goes_on_from_its_export(places):
  """Weights that were packed are on the grid: training from them begins with the loss that the export has."""
  data = [f"grain_train_files={places}/lines.jsonl", f"base_output_directory={places}"]
  first = {}
  for start in ("run", "export"):
    given = [f"checkpoint={places / start}", f"run_name=from-{start}", "steps=1"]
    rest = [argument for argument in STEPS if not argument.startswith("steps=")]
    assert main(["kimi-k3-tiny", *SMALL, *rest, *data, *given]) == 0
    line = (places / f"from-{start}/metrics.jsonl").read_text().splitlines()[0]
    first[start] = json.loads(line)["learning/lm_loss"]
  np.testing.assert_allclose(first["export"], first["run"], rtol=1e-6)


def test_the_run_exports_plain_too(places):
  assert convert.main([str(places / "run"), str(places / "plain")]) == 0
  _, run = values(places / "run", "scan_layers=false")
  _, plain = values(places / "plain", "scan_layers=false")
  same = jax.tree.map(lambda a, b: np.array_equal(a, b), run, plain)
  assert all(same.values()) and run.keys() == plain.keys()
