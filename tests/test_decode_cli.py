"""`python -m MaxText.decode` as a user meets it: answers, streams, JSON, and one line for each mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

import MaxText
from MaxText import decode
from MaxText.checkpoints.adapters import save_adapters
from MaxText.checkpoints.load import load_params
from MaxText.checkpoints.orbax_io import save_orbax
from MaxText.configs import loader
from MaxText.configs.command_line import EXAMPLE_KEY
from MaxText.configs.options import DecodeOptions
from MaxText.inference import weights
from MaxText.inference.model import Model
from MaxText.models.adapters import attach
from MaxText.tokenizers.registry import load_tokenizer
from tests.locations import ORACLE
from tests.reference.generator import k3_config_json, write_checkpoint

TOKENIZER = Path(MaxText.__file__).parent / "assets" / "kimi-k3-tiny"
VOCAB = 1024
TEXTS = ["def main(", "x", "尼罗河 😀 naïve = 1\\n" * 3]
pytestmark = pytest.mark.usefixtures("kept_programs")  # each run of the command is a new model
ARGS = ["max_new_tokens=12", "prefill_chunk=16", "max_target_length=128"]  # one set of shapes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """Two layers with a tokenizer: a dense KDA layer and an MLA layer with packed experts."""
  special = dict(bos_token_id=768, eos_token_id=770, pad_token_id=1023)
  config = k3_config_json(num_hidden_layers=2, full_attn_layers=(2,), vocab_size=VOCAB, **special)
  directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), config, seed=5)
  for name in ("tiktoken.model", "tokenizer_config.json"):
    shutil.copy(TOKENIZER / name, directory)
  return directory


@pytest.fixture
def run(capsys):
  """Runs the command in this process: status, stdout, stderr."""

  def command(*arguments):
    status = decode.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err

  return command


@pytest.fixture
def answers(run):
  """Runs the command for JSON and returns its objects."""

  def command(*arguments):
    status, out, err = run(*arguments, "output=json")
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]

  return command


# --- answers ----------------------------------------------------------------------------------------------


def test_greedy_decode_gives_the_reference_tokens(answers, tmp_path):
  if not ORACLE.is_dir():
    pytest.skip(f"the oracle checkpoint is not at {ORACLE}")
  reference = json.loads((ORACLE / "reference_tokens.json").read_text())
  whole = [case["prompt_and_continuation"] for case in reference.values()]
  lengths = {"short": 8, "chunk": 40}
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text("".join(f"{ids[:n]}\n" for ids, n in zip(whole, lengths.values())))
  got = answers(ORACLE, f"prompts_file={prompts}", "max_new_tokens=8", "prefill_chunk=16")
  for answer, ids, n in zip(got, whole, lengths.values()):
    assert answer["prompt_ids"] == ids[:n]
    assert answer["token_ids"][: len(ids) - n] == ids[n:]
    assert (answer["text"], answer["finish_reason"]) == (None, "length")


def test_json_has_one_object_a_prompt_with_its_figures(answers, checkpoint, tmp_path):
  prompts = tmp_path / "prompts.txt"
  prompts.write_text("\n".join(TEXTS) + "\n")
  got = answers(checkpoint, f"prompts_file={prompts}", *ARGS)
  tokenizer = load_tokenizer(checkpoint, VOCAB)
  assert [set(answer) for answer in got] == [
    {"prompt_ids", "token_ids", "text", "finish_reason", "stats"}
  ] * len(TEXTS)
  for text, answer in zip(TEXTS, got):
    assert answer["prompt_ids"] == tokenizer.encode(text)
    stats = answer["stats"]
    assert stats["prompt_tokens"] == len(answer["prompt_ids"])
    assert stats["new_tokens"] == len(answer["token_ids"]) <= 12
    assert stats["prompts"] == 3 and stats["weights"] == str(checkpoint)
    assert stats["decode_tokens_per_second"] > 0 < stats["prefill_tokens_per_second"]
    assert {"kda", "mla", "short_conv"} <= stats["implementations"].keys()


@pytest.mark.parametrize(
  "sampling",
  [pytest.param((), marks=pytest.mark.slow), ("temperature=0.9", "top_k=40", "top_p=0.9", "seed=3")],
)
def test_a_prompt_of_a_batch_is_answered_as_if_alone(answers, checkpoint, tmp_path, sampling):
  prompts = tmp_path / "prompts.txt"
  prompts.write_text("\n".join(TEXTS))
  together = answers(checkpoint, f"prompts_file={prompts}", *ARGS, *sampling)
  [alone] = answers(checkpoint, f"prompt={TEXTS[0]}", *ARGS, *sampling)
  assert alone["token_ids"] == together[0]["token_ids"]


def test_one_seed_gives_one_text(answers, checkpoint):
  args = (checkpoint, "prompt=x", *ARGS, "temperature=1")
  first, again, other = (answers(*args, f"seed={seed}")[0]["token_ids"] for seed in (1, 1, 2))
  assert first == again != other


def test_a_stop_token_ends_the_answer_and_is_no_part_of_the_text(answers, checkpoint):
  args = (checkpoint, "prompt=def main(", *ARGS)
  [free] = answers(*args)
  ids = free["token_ids"]
  stop = next(token for token in ids[2:] if token not in ids[:2])
  [stopped] = answers(*args, f"stop_ids={stop},1")
  end = ids.index(stop) + 1
  assert stopped["token_ids"] == ids[:end] and stopped["finish_reason"] == "stop"
  assert stopped["text"] == load_tokenizer(checkpoint, VOCAB).decode(ids[: end - 1], skip_special=True)
  assert free["finish_reason"] == "length"


def test_text_of_one_prompt_streams_what_json_says(run, answers, checkpoint, monkeypatch):
  pieces = []
  show = decode._print_text
  monkeypatch.setattr(decode, "_print_text", lambda index, text: (pieces.append(text), show(index, text)))
  args = (checkpoint, f"prompt={TEXTS[2]}", *ARGS, "temperature=1")
  status, out, err = run(*args)
  assert status == 0 and out == answers(*args)[0]["text"] + "\n"
  assert len(pieces) > 1 and "".join(pieces) + "\n" == out
  summary = err.splitlines()[-1]
  for part in ("new 12 tokens", "prefill", "decode", "tok/s", "kda=", f"weights: {checkpoint}"):
    assert part in summary


def test_texts_of_several_prompts_stand_below_headings(run, checkpoint, tmp_path):
  prompts = tmp_path / "prompts.txt"
  prompts.write_text("\n".join(TEXTS))
  status, out, _ = run(checkpoint, f"prompts_file={prompts}", *ARGS)
  assert status == 0
  assert [line for line in out.splitlines() if line.startswith("===")] == [
    f"=== {number} of 3" for number in (1, 2, 3)
  ]


def test_without_a_checkpoint_random_weights_are_said_in_plain_sight(run, checkpoint, tmp_path):
  shutil.copy(checkpoint / "config.json", tmp_path)
  status, out, err = run(tmp_path, "prompt_ids=5,7", *ARGS)
  assert status == 0 and len(out.split(",")) == 12
  assert "WARNING: random weights" in err and "weights: random weights" in err.splitlines()[-1]


@pytest.mark.slow  # compiles three models; tests/models/test_adapters.py holds the numbers
def test_adapters_of_packed_experts_and_of_attention_change_the_answer(answers, checkpoint, tmp_path):
  """Folded into plain experts, or beside packed ones: the same tokens either way."""
  cfg = loader.load(checkpoint, ["lora_rank=2", "lora_targets=self_attn,experts"])
  model = load_params(checkpoint, cfg, progress=False)
  attach(model, cfg, nnx.Rngs(0))
  state = nnx.state(model, nnx.LoRAParam)
  for _, variable in nnx.to_flat_state(state):
    variable.set_value(variable[...] + 0.05)
  nnx.update(model, state)
  file = tmp_path / "adapter.safetensors"
  save_adapters(model, cfg, file)
  bare, packed, plain = (
    answers(checkpoint, "prompt=x", *ARGS, *more)[0]["token_ids"]
    for more in ([], [f"adapters={file}"], [f"adapters={file}", "expert_weights=dequantized"])
  )
  assert packed == plain != bare
  mesh = ["mesh=cpu-8", "ici_tensor_parallelism=1", "ici_fsdp_parallelism=4"]
  for more in ([], ["moe_dispatch=ragged_all_to_all"]):
    assert answers(checkpoint, "prompt=x", *ARGS, f"adapters={file}", *mesh, *more)[0]["token_ids"] == packed


@pytest.mark.slow  # tests/checkpoints restores the same tree; this adds the command's way to it
def test_an_orbax_checkpoint_gives_the_same_answer(answers, checkpoint, tmp_path):
  save_orbax(load_params(checkpoint, loader.load(checkpoint)), tmp_path / "orbax", companions=checkpoint)
  want = answers(checkpoint, "prompt=x", *ARGS)
  for arguments in ((checkpoint, f"checkpoint={tmp_path / 'orbax'}"), (tmp_path / "orbax",)):
    got = answers(*arguments, "prompt=x", *ARGS)
    assert (got[0]["token_ids"], got[0]["text"]) == (want[0]["token_ids"], want[0]["text"])


# --- mistakes ---------------------------------------------------------------------------------------------

IDS = "prompt_ids=5"
MISTAKES = {
  "no prompt": ((), "no prompt: give prompt=TEXT"),
  "two prompts": (("prompt=x", IDS), "command line: prompt: excludes prompt_ids; give one"),
  "empty prompt": (("prompt=",), "prompt: empty prompt"),
  "no ids": (("prompts_file=/nowhere/x.txt",), "/nowhere/x.txt: No such file"),
  "unknown id": (("prompt_ids=5,1024",), "token id 1024: outside the vocabulary, expected 0 to 1023"),
  "unknown key": ((IDS, "tempreture=1"), "unknown key, did you mean 'temperature'?"),
  "wrong type": ((IDS, "max_new_tokens=many"), "max_new_tokens: got 'many', expected a whole number > 0"),
  "no new tokens": ((IDS, "max_new_tokens=0"), "max_new_tokens: got 0"),
  "top_p=0": ((IDS, "top_p=0"), "top_p: got 0, expected a number > 0 and <= 1"),
  "top_p>1": ((IDS, "top_p=1.5"), "top_p: got 1.5"),
  "cold": ((IDS, "temperature=-1"), "temperature: got -1"),
  "large seed": ((IDS, "seed=4294967296"), "seed: got 4294967296"),
  "unknown stop id": ((IDS, "stop_ids=5000"), "stop_ids: token id 5000"),
  "no value": ((IDS, "top_k"), "top_k: expected key=value"),
  "too long": (
    ("prompt_ids=1,2,3,4,5,6", "max_target_length=6"),
    "prompt has 6 tokens, but the context holds 6",
  ),
  "no checkpoint": ((IDS, "checkpoint=/nowhere"), "checkpoint: /nowhere: no such directory"),
  "no weights": ((IDS, f"checkpoint={Path(__file__).parent}"), "holds no whole checkpoint"),
  "another vocabulary": (
    (IDS, "vocab_size=1025"),
    "another architecture than the configuration: vocab_size 1024 there, 1025 here",
  ),
  "another shape": ((IDS, "base_mlp_dim=96"), "another architecture than the configuration: base_mlp_dim 80"),
  # no weight changes its shape with these, only every answer
  "another meaning": ((IDS, "attn_res_block_size=1"), "another architecture"),
  "huge dispatch": ((IDS, "steps_per_dispatch=99999999999"), "steps_per_dispatch: got 99999999999, expected"),
  "step for a prompt": (("prompt_ids=5,7", "kda_impl=step"), "kda_impl: step takes one token a call"),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_status_2(run, checkpoint, arguments, message):
  status, out, err = run(checkpoint, *arguments)
  assert (status, out) == (2, "")
  assert err.startswith("error: ") and err.count("\n") == 1
  assert message in err


def test_what_only_looks_like_a_mistake_is_served(answers, checkpoint):
  plain = answers(checkpoint, IDS, *ARGS)
  huge = answers(checkpoint, IDS, "checkpoint=", "top_k=99999999999", "temperature=1e-30", *ARGS)
  assert huge[0]["token_ids"] == plain[0]["token_ids"]


def test_random_weights_of_a_known_model_keep_its_tokenizer():
  shallow = loader.load("kimi-k3-tiny", ["base_num_decoder_layers=2", "full_attn_layers=2"])
  source = weights.find(shallow, None, "kimi-k3-tiny")
  assert source.directory is None and "base_num_decoder_layers 9 there, 2 here" in source.note
  assert weights.read_tokenizer(shallow, source).encode("x")
  wider = loader.load("kimi-k3-tiny", ["vocab_size=1030"])
  assert weights.read_tokenizer(wider, weights.find(wider, None, "kimi-k3-tiny")) is None


def test_a_missing_configuration_shows_the_usage(run):
  for arguments in ((), ("prompt=x",)):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("usage: python -m MaxText.decode CONFIG") and "kimi-k3-tiny" in err
  status, _, err = run("kimi-k3-tony", "prompt=x")
  assert status == 2 and "did you mean 'kimi-k3-tiny'?" in err


def test_a_checkpoint_of_another_architecture_is_refused_by_name(run, checkpoint):
  status, _, err = run("kimi-k3-tiny", IDS, f"checkpoint={checkpoint}")
  assert status == 2 and "base_num_decoder_layers 2 there, 9 here" in err


def test_a_config_that_lacks_an_architecture_key_is_refused(run, checkpoint, tmp_path):
  config = json.loads((checkpoint / "config.json").read_text())
  del config["text_config"]["activation_situ_beta"]
  (tmp_path / "config.json").write_text(json.dumps(config))
  status, out, err = run(tmp_path, IDS)
  assert (status, out) == (2, "") and "missing architecture key text_config.activation_situ_beta" in err


def test_a_truncated_file_is_refused(run, checkpoint, tmp_path):
  for path in checkpoint.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes()[: -100 if path.suffix == ".safetensors" else None])
  status, out, err = run(tmp_path, IDS)
  assert (status, out) == (2, "") and err.count("\n") == 1 and "model.safetensors" in err


def test_an_interrupt_is_no_traceback(run, checkpoint, monkeypatch):
  def interrupt(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(Model, "answer", interrupt)
  status, _, err = run(checkpoint, IDS)
  assert status == 130 and err.endswith("interrupted\n")


# --- the command itself -----------------------------------------------------------------------------------


def test_the_key_that_help_shows_fits_every_model():
  for model in loader.known_models():
    assert loader.load(model, [EXAMPLE_KEY]).max_position_embeddings == 1024


def test_help_explains_every_key(run):
  status, out, _ = run("--help")
  assert status == 0
  for key in DecodeOptions.model_fields:
    assert f" {key}=" in out
  assert "examples:" in out and "max_shard_bytes" not in out


PROBE = """
import sys, time
import MaxText
assert "jax" not in sys.modules and "numpy" not in sys.modules
start = time.perf_counter()
from MaxText import decode
print(time.perf_counter() - start)
start = time.perf_counter()
status = decode.main(["kimi-k3", "prompt=x"])
print(time.perf_counter() - start)
import MaxText.inference.model
heavy = {"maxtext", "torch", "tensorflow", "orbax.checkpoint", "tokamax", "transformers"}
print(sorted(heavy & set(sys.modules)))
sys.exit(status)
"""


def test_the_command_imports_fast_and_refuses_a_model_of_terabytes_at_once():
  done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
  importing, refusing, heavy = done.stdout.splitlines()
  assert float(importing) < 3
  assert float(refusing) < 5  # about one second on an idle machine
  assert heavy == "[]"
  assert done.returncode == 2
  assert done.stderr.startswith("error: kimi-k3: too large for this machine: needs 1,55")


def test_a_reader_that_leaves_is_no_traceback(checkpoint):
  command = [sys.executable, "-m", "MaxText.decode", "--help"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()


# --- many devices -----------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/models/test_many_devices.py has the same programs without the command
def test_a_mesh_gives_the_tokens_of_one_device(answers, run, checkpoint):
  request = [checkpoint, "prompt_ids=5,7,9", *ARGS]
  (alone,) = answers(*request)
  sizes = ["ici_tensor_parallelism=1", "ici_fsdp_parallelism=4"]  # three heads, which no two devices share
  (shared,) = answers(*request, "mesh=cpu-8", *sizes)
  assert shared["token_ids"] == alone["token_ids"]
  assert shared["stats"]["device"] == "8 x cpu"


@pytest.mark.parametrize(
  "keys, words",
  [
    (["mesh=cpu-8"], "mesh cpu-8: ici_tensor_parallelism=2: heads of 3 "),
    (["mesh=cpu-8", "ici_data_parallelism=2"], "mesh cpu-8: needs 16 devices "),
    (["mesh=cpu8"], "mesh: cpu8: no such file or mesh, did you mean 'cpu-8'?"),
    (["ici_fsdp_parallelism=8"], "ici_fsdp_parallelism: needs a mesh"),
    (["moe_dispatch=ragged_all_to_all", "moe_capacity_factor=1.0"], "moe_capacity_factor: "),
    (["moe_capacity_factor=1.0"], "moe_capacity_factor: local_experts drops nothing"),
  ],
)
def test_a_mistake_about_devices_is_one_line(run, checkpoint, keys, words):
  status, out, err = run(checkpoint, "prompt_ids=5,7,9", *keys)
  assert status == 2 and out == ""
  assert words in err and len(err.strip().splitlines()) == 1
