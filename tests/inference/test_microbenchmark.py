"""The microbenchmark: maxtext's names, figures that follow from the samples, mistakes in one line."""

import ast
import dataclasses
import importlib.util
import json
import re
import statistics
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from MaxText import inference_microbenchmark as command
from MaxText.common.errors import InputError
from MaxText.configs.loader import load_command
from MaxText.configs.options import MicrobenchmarkOptions
from MaxText.inference import memory, microbenchmark_attention, microbenchmark_plot
from MaxText.inference.microbenchmark import Microbenchmark, summary
from MaxText.inference.microbenchmark_extent import attention_bytes, extent
from tests.inference.small_engine import SHAPE, SPECIAL
from tests.reference.generator import k3_config_json, write_checkpoint

pytestmark = pytest.mark.usefixtures("kept_programs")
PREFIX = "inference_microbenchmark_"
ROUNDS, LENGTHS, CONTEXTS, SLOTS, NEW = 3, (5, 20), (12, 36), 2, 4
KEYS = [
  f"{PREFIX}stages=prefill,insert,prefill-multisampling,generate,sweep,end-to-end",
  f"{PREFIX}prefill_lengths=5,20",
  f"{PREFIX}context_lengths=12,36",
  f"{PREFIX}num_samples=1,2",
  f"{PREFIX}loop_iters={ROUNDS}",
  f"{PREFIX}requests=5",
  f"slots={SLOTS}",
  f"max_new_tokens={NEW}",
  "max_target_length=64",
  "page_size=8",
  "prefill_chunk=16",
  "steps_per_round=4",
]
# what consumers of maxtext's results read: section -> names of one entry
NAMES = {
  "prefill-result-sizes": {
    *("num_logits_params", "total_logits_size", "avg_logits_param_size"),
    *("num_cache_params", "total_cache_size", "avg_cache_param_size"),
  },
  "prefill": {"time_in_ms", "total_tflops_per_device", "tflops_per_sec_per_device"},
  "insert": {"time_in_ms"},
  "prefill-multisampling": {"time_in_ms"},
  "autoregressive": {
    *("step_in_ms", "step_in_ms_per_seq", "global_batch_size"),
    *("total_throughput_tokens_per_second", "bw_per_device_GB_per_second"),
  },
  "sizes": {"model_size_in_gb", "cache_size_in_gb", "model_params_in_billions"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """One layer of each kind: what is timed here need not be deep."""
  shape = SHAPE | dict(num_hidden_layers=2, full_attn_layers=(2,))
  config = k3_config_json(**shape, **SPECIAL)
  return write_checkpoint(tmp_path_factory.mktemp("benchmark"), config, seed=12, dtype="f32")


@pytest.fixture(scope="module")
def loaded(directory):
  return load_command(directory, KEYS, MicrobenchmarkOptions)


@pytest.fixture(scope="module")
def benchmark(directory, loaded):
  return command.load(str(directory), *loaded, extent(*loaded))[0]


@pytest.fixture(scope="module")
def results(benchmark):
  return benchmark.run()


def entries(section):
  """The dictionaries of one section that stand for one measurement."""
  if any(not isinstance(value, dict) for value in section.values()):
    yield section
  else:
    for value in section.values():
      yield from entries(value)


def test_the_names_are_those_of_maxtext(results):
  for section, names in NAMES.items():
    found = list(entries(results[section]))
    assert found and all(names <= entry.keys() for entry in found), section
  for section in ("prefill-result-sizes", "prefill", "insert", "prefill-multisampling"):
    assert tuple(results[section]) == LENGTHS
  assert tuple(results["prefill-multisampling"][5]) == (1, 2)


@pytest.mark.train
def test_functions_of_maxtext_read_the_results(results, capsys):
  """The two functions that take its results apart, from its own source."""
  found = importlib.util.find_spec("maxtext")
  if found is None:
    pytest.skip("maxtext, of the extra [train], is not installed")
  source = (
    Path(found.submodule_search_locations[0]) / "inference" / "inference_microbenchmark.py"
  ).read_text()
  assert all(f'"{name}"' in source for names in NAMES.values() for name in names)
  wanted = ("flatten_dict", "print_results_for_analyze")
  kept = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name in wanted]
  theirs = {"MutableMapping": dict}
  exec(compile(ast.Module(kept, []), "maxtext", "exec"), theirs)
  theirs["print_results_for_analyze"](results)
  assert capsys.readouterr().out.splitlines()[2:] == list(summary(results))
  plain = {key: value for key, value in results.items() if key != "flattened_results"}
  flat = theirs["flatten_dict"](plain).items()
  assert results["flattened_results"] == {k: v for k, v in flat if not isinstance(v, list)}


def timed(node):
  """Every distribution in the results, with its name."""
  for key, value in node.items():
    if isinstance(value, dict):
      if "samples_in_ms" in value:
        yield key, value
      yield from timed(value)


def test_percentiles_follow_from_the_samples(results):
  found = list(timed(results))
  assert len(found) > 20
  for _, entry in found:
    samples = entry["samples_in_ms"]
    assert min(samples) > 0 and entry["min_in_ms"] == min(samples) and entry["max_in_ms"] == max(samples)
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    for percent in (50, 90, 99):
      assert entry[f"p{percent}_in_ms"] == pytest.approx(cuts[percent - 1])
    assert entry["mean_in_ms"] == pytest.approx(statistics.mean(samples))
    for name in {"time_in_ms", "step_in_ms"} & entry.keys():
      assert entry[name] == pytest.approx(statistics.median(samples))


def test_every_round_is_a_sample_and_no_warm_up_is(results):
  for section in ("prefill", "insert", "prefill-multisampling", "move"):
    assert {len(entry["samples_in_ms"]) for _, entry in timed(results[section])} == {ROUNDS}
  step = results["autoregressive"]
  assert len(step["samples_in_ms"]) == len(step["dispatch"]["samples_in_ms"]) == ROUNDS
  assert {len(entry["samples_in_ms"]) for entry in results["sweep"]["batch"].values()} == {
    4
  }  # there and back


def test_rates_are_the_work_over_the_time(results):
  step = results["autoregressive"]
  seconds = step["step_in_ms"] / 1e3
  assert step["global_batch_size"] == SLOTS
  assert step["total_throughput_tokens_per_second"] == pytest.approx(SLOTS / seconds)
  assert step["step_in_ms_per_seq"] == pytest.approx(step["step_in_ms"] / SLOTS)
  assert step["bw_per_device_GB_per_second"] * seconds * 1e9 == pytest.approx(sum(step["bytes"].values()))
  gap = step["step_in_ms"] - step["dispatch"]["step_in_ms"]
  assert step["dispatch"]["host_gap_in_ms_per_step"] == pytest.approx(gap)
  prompt = results["prefill"][20]
  assert prompt["total_tflops_per_device"] * 1e12 == pytest.approx(sum(prompt["flops"].values()))
  assert prompt["chunks"] == 2  # 16 and 4 tokens


def test_a_prompt_of_two_chunks_moves_the_weights_twice_and_the_head_once(results, loaded):
  cfg, _ = loaded
  one, two = (results["prefill"][length]["bytes"]["weights"] for length in LENGTHS)
  row = 4 * cfg.base_emb_dim
  looked_up = (LENGTHS[1] - 2 * LENGTHS[0]) * row
  assert two == 2 * one + looked_up - cfg.vocab_size * row


def test_the_sweep_shows_flat_state_and_linear_latents(results):
  sweep = results["sweep"]
  assert tuple(sweep["batch"]) == (1, SLOTS) and tuple(sweep["context"]) == CONTEXTS
  short, long = (sweep["context"][context] for context in CONTEXTS)
  grown = long["context_tokens"] - short["context_tokens"]
  assert abs(short["context_tokens"] - CONTEXTS[0]) <= 1 and grown == CONTEXTS[1] - CONTEXTS[0]
  assert short["bytes"]["state"] == long["bytes"]["state"] > 0
  per_token = results["sizes"]["latent_bytes_per_token"]
  assert long["bytes"]["latents"] - short["bytes"]["latents"] == SLOTS * grown * per_token
  layers = sweep["attention"]
  assert len({layers["kda"][context]["memory_bytes"] for context in CONTEXTS}) == 1
  mla = [layers["mla"][context]["memory_bytes"] for context in CONTEXTS]
  assert mla[1] - mla[0] == SLOTS * grown * per_token
  assert sweep["batch"][1]["bytes"]["state"] * SLOTS == sweep["batch"][SLOTS]["bytes"]["state"]


def test_sizes_are_those_of_the_arrays(benchmark, results):
  nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  sizes, engine = results["sizes"], benchmark._engine
  assert sizes["cache_size_in_gb"] * 1e9 == pytest.approx(nbytes(engine._state.pools))
  assert sizes["model_size_in_gb"] * 1e9 == pytest.approx(nbytes(engine._programs.params))
  packed = {True: 2, False: 1}  # two weights a byte; their scales are no parameters
  count = sum(
    leaf.size * packed[str(path[-1]).endswith("_packed")]
    for path, leaf in nnx.to_flat_state(engine._programs.params)
    if not str(path[-1]).endswith("_scale")
  )
  assert sizes["model_params_in_billions"] * 1e9 == pytest.approx(count)
  cache = results["prefill-result-sizes"][20]
  assert (
    cache["total_cache_size"]
    == sizes["recurrent_state_bytes_per_slot"] + 20 * (sizes["latent_bytes_per_token"])
  )
  assert cache["num_logits_params"] == 64  # of the last token alone


def test_requests_end_to_end_are_counted(results):
  load = results["end-to-end"]
  assert (load["requests"], load["concurrency"], load["new_tokens"]) == (5, SLOTS, 5 * NEW)
  assert load["peak_concurrency"] == SLOTS
  assert load["prompt_tokens"] == 5 + 20 + 5 + 20 + 5
  assert len(load["time_to_first_token"]["samples_in_ms"]) == 5
  assert len(load["inter_token"]["samples_in_ms"]) == 5 * (NEW - 1)
  assert load["total_throughput_tokens_per_second"] * load["time_in_s"] == pytest.approx(5 * NEW)


def test_compile_time_stands_apart(results, benchmark):
  stages = results["compile"]
  assert sum(stage["programs"] for stage in stages.values()) == benchmark._engine.program_count
  assert sum(stage["seconds"] for stage in stages.values()) == pytest.approx(
    benchmark._engine.compile_seconds
  )
  assert stages["sweep"]["programs"] == stages["end-to-end"]["programs"] == 0  # seen before


def test_a_backend_without_memory_statistics_is_told(results):
  for device in results["device_memory"]:
    assert device["bytes_in_use"] is device["peak_bytes_in_use"] is device["bytes_limit"] is None
    assert device["reason"] == "the cpu backend reports no memory statistics"


def test_the_surroundings_are_told(results):
  where = results["environment"]
  assert where["jax"] == jax.__version__ and where["platform"] == "cpu" and where["dtype"] == "float32"
  assert {"kda", "mla", "grouped_mlp"} <= where["implementations"].keys()


def test_the_engine_is_idle_afterwards(results, benchmark):
  resources = benchmark._engine.resources
  assert resources.used_slots == resources.used_pages == 0 and not benchmark._engine.active.any()


@pytest.mark.parametrize(
  "stage, sections",
  [
    ("prefill", {"prefill-result-sizes", "prefill", "insert", "move"}),
    ("insert", {"insert"}),
    ("generate", {"autoregressive"}),
    ("end-to-end", {"end-to-end"}),
  ],
)
def test_a_stage_runs_alone(benchmark, loaded, stage, sections):
  cfg, options = loaded
  options = options.model_copy(update={f"{PREFIX}stages": (stage,)})
  alone = Microbenchmark(
    benchmark._engine, cfg, options, extent(cfg, options), benchmark._engine._programs.params
  ).run()
  always = {"sizes", "compile", "device_memory", "environment", "flattened_results"}
  assert alone.keys() == sections | always


def test_an_answer_that_breaks_off_is_no_figure(benchmark):
  engine = benchmark._engine
  whole = engine._programs.params
  engine._programs.params = jax.tree.map(lambda x: x * np.nan if x.dtype == np.float32 else x, whole)
  try:
    with pytest.raises(InputError, match="logits are not finite"):
      benchmark.generate()
    engine.restart()
    with pytest.raises(InputError, match="end-to-end: an answer ended early: not_finite"):
      benchmark.end_to_end()
  finally:
    engine._programs.params = whole
    engine.restart()


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_json(directory, tmp_path, capsys):
  log = tmp_path / "results.json"
  keys = [*KEYS[1:], f"{PREFIX}stages=insert", f"{PREFIX}log_file_path={log}"]
  assert command.main([str(directory), *keys]) == 0
  printed = capsys.readouterr()
  results = json.loads(printed.out)
  assert results == json.loads(log.read_text())
  assert printed.err.splitlines()[-1].startswith("INSERT_BUCKET_SIZE_TO_MS = {5: ")
  assert results["environment"]["weights"] == str(directory)


@pytest.fixture
def begun(benchmark, loaded, monkeypatch):
  """Lets the command run single stages on the engine that is there."""
  cfg, _ = loaded

  def load(config, _, options, reach):
    weights = benchmark._engine._programs.params
    return Microbenchmark(benchmark._engine, cfg, options, reach, weights), "weights of the test"

  monkeypatch.setattr(command, "load", load)


def test_a_stage_that_fails_leaves_what_was_measured_before(begun, directory, monkeypatch, capsys):
  def broken(self):
    raise InputError("an answer ended early")

  monkeypatch.setattr(Microbenchmark, "generate", broken)
  assert command.main([str(directory), *KEYS[1:], f"{PREFIX}stages=insert,generate"]) == 2
  printed = capsys.readouterr()
  assert printed.err.splitlines()[-1] == "error: an answer ended early"
  results = json.loads(printed.out)
  assert tuple(results["insert"]) == ("5", "20") and "autoregressive" not in results


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line_and_the_results_are_printed(begun, directory, capsys):
  keys = [*KEYS[1:], f"{PREFIX}stages=insert", f"{PREFIX}log_file_path=/dev/full"]
  assert command.main([str(directory), *keys]) == 2
  printed = capsys.readouterr()
  words = "/dev/full: cannot be written (No space left on device); the results are on stdout"
  assert printed.err.splitlines()[-1] == f"error: {PREFIX}log_file_path: {words}"
  assert "insert" in json.loads(printed.out)


def test_a_picture_has_a_panel_for_each_result(results, tmp_path):
  pytest.importorskip("matplotlib", reason="matplotlib, of the extra [plot], is not installed")
  microbenchmark_plot.plot(results, tmp_path / "all.svg")
  microbenchmark_plot.plot({key: results[key] for key in ("insert", "environment")}, tmp_path / "one.svg")
  every, one = (
    set(re.findall("<!-- (.*) -->", (tmp_path / name).read_text())) for name in ("all.svg", "one.svg")
  )
  titles = {"prompt", "decode step by batch", "decode step by context", "one attention layer"}
  assert titles <= every and titles & one == {"prompt"}


@pytest.mark.parametrize(
  "overrides, words",
  [
    (
      [f"{PREFIX}stages=prefil"],
      "expected a list of prefill, insert, prefill-multisampling, generate, sweep",
    ),
    ([f"{PREFIX}stages="], f"{PREFIX}stages: got an empty list, expected at least one entry"),
    ([f"{PREFIX}prefill_lengths=64,0"], f"{PREFIX}prefill_lengths: got 0, expected whole numbers > 0"),
    ([f"{PREFIX}loop_iters=0"], f"{PREFIX}loop_iters: got 0, expected a whole number > 0"),
    ([f"{PREFIX}loop_iter=3"], f"did you mean '{PREFIX}loop_iters'"),
    (
      [f"{PREFIX}prefill_lengths=4090"],
      f"{PREFIX}prefill_lengths: 4090 tokens and 64 new ones exceed max_pos",
    ),
    (
      ["max_target_length=512"],
      f"{PREFIX}context_lengths: 2048 tokens and 13 new ones exceed max_target_length",
    ),
    ([f"{PREFIX}batch_sizes=16"], f"{PREFIX}batch_sizes: 16 exceeds slots 8; give slots=16"),
    (
      [f"{PREFIX}stages=prefill-multisampling", "slots=2"],
      f"{PREFIX}num_samples: 5 exceeds slots 2",
    ),
    (["pages=3"], "pages: 3 are too few: 8 requests of 2061 tokens each take 264"),
    (
      [f"{PREFIX}log_file_path=/no/such/file"],
      f"{PREFIX}log_file_path: /no/such/file: no directory /no/such",
    ),
    ([f"{PREFIX}log_file_path=/tmp"], f"{PREFIX}log_file_path: /tmp: cannot be written"),
    ([f"{PREFIX}plot_path=/tmp/figure.doc"], "expected a name that ends in .png, .svg, .pdf"),
    (["checkpoint=/no/such"], "checkpoint: /no/such: no such directory"),
  ],
)
def test_a_mistake_is_one_line(overrides, words, capsys):
  assert command.main(["kimi-k3-tiny", *overrides]) == 2
  printed = capsys.readouterr()
  assert words in printed.err.splitlines()[-1] and printed.out == ""


@pytest.mark.parametrize("stage", ["sweep", "generate", "prefill", "insert", "prefill-multisampling"])
def test_a_stage_bounds_the_engine_by_the_keys_that_it_reads(stage):
  keys = [f"{PREFIX}stages={stage}", f"{PREFIX}prefill_lengths=600", f"{PREFIX}context_lengths=100"]
  reach = extent(*load_command("kimi-k3-tiny", keys, MicrobenchmarkOptions))
  timed = 12 + 1  # steps of a decoding, and the first token of the answer
  assert reach.max_target_length == {"sweep": 100 + timed, "generate": 600 + timed}.get(stage, 600 + 1)


def test_a_model_that_leaves_out_rows_is_refused(monkeypatch, capsys):
  monkeypatch.setattr(command, "load", lambda *_: pytest.fail("loads all the same"))
  assert command.main(["kimi-k3-tiny", "moe_dispatch=ragged_all_to_all", "moe_capacity_factor=1.0"]) == 2
  assert "moe_capacity_factor: an answer may not depend on its neighbours" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused_at_once(monkeypatch, capsys):
  monkeypatch.setattr(command, "load", lambda *_: pytest.fail("loads all the same"))
  monkeypatch.setattr(memory, "available_bytes", lambda devices=None: (64 * memory.GIB, "test memory"))
  assert command.main(["kimi-k3", "dtype=bfloat16"]) == 2
  assert "kimi-k3: too large for this machine: needs" in capsys.readouterr().err


def test_the_layers_that_the_sweep_allocates_beside_the_engine_are_counted(loaded, monkeypatch):
  """By the arrays of the layers themselves; only one of them is there at a time."""
  cfg, options = loaded
  held, layers = {}, weakref.WeakSet()

  def sized(layer, context):
    layers.add(layer)
    assert list(layers) == [layer]
    arrays = (layer._programs.params, dataclasses.replace(layer._memory, **no_table(layer._memory)))
    held[type(layer._memory).__name__] = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    return 1.0

  no_table = lambda memory: {"table": None, "length": None} if hasattr(memory, "table") else {}
  monkeypatch.setattr(microbenchmark_attention._Layer, "seconds", sized)
  microbenchmark_attention.attention_steps(cfg, SLOTS, CONTEXTS, options.page_size, 1, 0)
  assert held.keys() == {"KdaCache", "MlaPages"}
  assert attention_bytes(cfg, options) == max(held.values())
  only_prompts = options.model_copy(update={f"{PREFIX}stages": ("prefill",)})
  assert attention_bytes(cfg, only_prompts) == 0


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(monkeypatch, capsys):
  monkeypatch.setattr(microbenchmark_plot.importlib.util, "find_spec", lambda name: None)
  assert command.main(["kimi-k3-tiny", f"{PREFIX}plot_path=/tmp/figure.png"]) == 2
  assert 'matplotlib is not installed; pip install "maxtext-kimi-k3[plot]"' in capsys.readouterr().err


def test_lists_may_be_text_as_in_files_of_maxtext(tmp_path):
  model = tmp_path / "mine.yml"
  keys = [f'{PREFIX}prefill_lengths: "64,128"', f'{PREFIX}stages: "prefill,generate"']
  model.write_text("\n".join(["base_config: models/kimi-k3-tiny.yml", *keys]))
  _, options = load_command(model, [], MicrobenchmarkOptions)
  assert options.inference_microbenchmark_prefill_lengths == (64, 128)
  assert options.inference_microbenchmark_stages == ("prefill", "generate")


def test_help_tells_every_key(capsys):
  assert command.main(["--help"]) == 0
  text = capsys.readouterr().out
  assert all(f"    {key}=" in text for key in MicrobenchmarkOptions.model_fields)
