"""A run that trained through the MXFP4 grid, to the directory that others read, and back."""

import json

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
  assert convert.main([str(root / "run"), str(root / "export")]) == 0
  assert convert.main([str(root / "export"), str(root / "orbax")]) == 0
  assert convert.main([str(root / "orbax"), str(root / "again")]) == 0
  return root


def tensors(directory):
  return {path.name: path.read_bytes() for path in directory.glob("*.safetensors*")}


def values(path, *overrides):
  return ParameterTree(load_params(path, loader.load(path, overrides), progress=False)).values


def magnitudes(tree):
  """Different mantissas of the experts' w1."""
  found = [np.asarray(value) for path, value in tree.items() if path.endswith(".experts.w1")]
  assert found and all(value.dtype == np.float32 for value in found)
  return np.unique(np.abs(np.frexp(np.concatenate([value.ravel() for value in found]))[0])).size


def test_a_run_keeps_what_the_optimizer_moved_and_is_read_as_it_computes(places):
  """Only more of such training gets experts between the points of the grid."""
  plain = "expert_weights=dequantized"
  assert magnitudes(values(places / "run", plain, "mxfp4_qat=true")) > 1000
  assert (
    magnitudes(values(places / "run", plain)) <= 3
  )  # 0, and the mantissas of 0.5, 1, 2, 4 and of 1.5, 3, 6
  assert any(path.endswith("experts.w1_packed") for path in values(places / "run"))


def test_the_export_decodes_as_the_run_computes(places):
  run, export = (MaxText.from_pretrained(str(places / name), dtype="float32") for name in ("run", "export"))
  as_trained = {"mxfp4_qat": True, "expert_weights": "dequantized"}
  trained = MaxText.from_pretrained(str(places / "run"), dtype="float32", **as_trained)
  ids = run.tokenizer.encode("word word word word word")
  expected = trained.logits(ids)
  for model in (run, export):
    np.testing.assert_allclose(model.logits(ids), expected, rtol=0, atol=2e-6 * float(np.abs(expected).max()))
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


def test_the_run_exports_plain_numbers_of_the_grid(places):
  assert convert.main([str(places / "run"), str(places / "plain"), "expert_quantization=none"]) == 0
  plain = values(places / "plain")
  assert magnitudes(plain) <= 3
  packed = values(places / "export", "expert_weights=dequantized")
  assert plain.keys() == packed.keys()
  assert all(np.array_equal(value, packed[path]) for path, value in plain.items())


def test_a_run_does_not_go_on_off_the_grid(places, capfd):
  data = [f"grain_train_files={places}/lines.jsonl", f"base_output_directory={places}", "run_name=run"]
  off = [argument for argument in STEPS if argument != "mxfp4_qat=true"]
  assert main(["kimi-k3-tiny", *SMALL, *off, *data]) == 2
  assert "run: mxfp4_qat is True in this run, False now" in capfd.readouterr().err
