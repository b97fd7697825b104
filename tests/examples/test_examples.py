"""The examples and benchmarks run at a small size."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from probe_forked import run_program

from rlframework import load_config
from rlframework.base.errors import ConfigError, WorkerError
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = sorted(
    path
    for path in (ROOT / "examples").rglob("*.yaml")
    if path.name != "smollm2.yaml" and "recipes" not in path.parts  # test_recipes.py
)


def script(program: Path, *words: object) -> str:
    """Run the script, which must succeed, and return its output."""
    done = run_program(program, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_configurations_load(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)  # of functions that it names
    rows = ["environment.train_path=train.jsonl"] if "name: gsm8k" in path.read_text() else []
    assert load_config(path, rows).policy.backend == "dtensor"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ConfigError("not so"), 2, "error: not so\n"),
        (WorkerError("rank 1 died"), 1, "error: rank 1 died\n"),
    ],
)
def test_the_quickstart_tells_errors_as_the_command_line_does(tmp_path, monkeypatch, capsys, error, code, told):
    def fail(*arguments):
        raise error

    program = runpy.run_path(str(ROOT / "examples" / "quickstart" / "run.py"))
    monkeypatch.setitem(program["main"].__globals__, "run_seed", fail)
    monkeypatch.setattr(sys, "argv", ["run.py", "--output", str(tmp_path)])
    assert program["main"]() == code
    assert capsys.readouterr().err == told


def test_the_quickstart_runs_both_phases_and_draws_the_curve(tmp_path):
    short = ["sft:algorithm.num_steps=2", "grpo:algorithm.num_steps=2", "grpo:policy.scheduler.warmup_steps=0"]
    small = ["sft:policy.scheduler.warmup_steps=0", "algorithm.validation.samples=8", "observers.console=false"]
    run = ROOT / "examples" / "quickstart" / "run.py"
    printed = script(run, "--output", tmp_path, "--seed", 5, *short, *small)
    lines = [line for line in printed.splitlines() if "held-out accuracy" in line]
    assert [line.split()[0] for line in lines] == ["sft", "grpo"]
    assert (tmp_path / "seed-5" / "curve.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (tmp_path / "seed-5" / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]


@pytest.mark.thorough
def test_the_policy_benchmark_checks_that_both_sides_agree_and_writes_json(tmp_path):
    few = ["--pairs", 1, "--rows", 8, "--longest", 40, "--modes", "packed", "--lengths", "tailed"]
    few += ["--vocabulary", 30_000]
    printed = script(ROOT / "benchmarks" / "policy.py", *few, "--json", tmp_path / "policy.json")
    assert "gradient norm, rlframework packed against the sorted loop" in printed
    written = json.loads((tmp_path / "policy.json").read_text())
    assert written["lengths"]["tailed"]["results"].keys() == {"log-probabilities", "training"}
    # whole logits, their softmax and its gradient, of 1,024 x 30,000 in fp32, beside the gradient of the head's weight
    assert written["head_bytes"]["whole logits"] > 3 * 1024 * 30_000 * 4
    assert written["head_bytes"]["in chunks"] < written["head_bytes"]["whole logits"] / 2


@pytest.mark.thorough
def test_the_policy_benchmark_goes_against_a_bare_loop_of_deepspeed(tmp_path):
    few = ["--pairs", 1, "--rows", 12, "--longest", 20, "--modes", "packed", "--lengths", "even", "--no-head"]
    own = ["--backend", "deepspeed", "--keys", "zero_optimization.stage=1", "--json", tmp_path / "policy.json"]
    printed = script(ROOT / "benchmarks" / "policy.py", *few, *own)
    assert "deepspeed zero_optimization.stage=1 against a plain loop of DeepSpeed" in printed
    assert "gradient norm, rlframework packed against the sorted loop" in printed
    written = json.loads((tmp_path / "policy.json").read_text())
    assert written["settings"]["keys"] == ["zero_optimization.stage=1"]


@pytest.mark.thorough
def test_the_generation_benchmark_writes_json(tmp_path):
    few = ["--pairs", 1, "--samples", 2, "--tokens", 8]
    script(ROOT / "benchmarks" / "generation.py", *few, "--json", tmp_path / "generation.json")
    results = json.loads((tmp_path / "generation.json").read_text())["results"]
    assert results.keys() == {"generation, fixed", "generation, ragged"}


@pytest.mark.thorough
def test_the_benchmarks_of_learning_train_what_is_missing(tmp_path):
    """From a model of random weights in the place of the quickstart's; a second call trains nothing."""
    place = tmp_path / "seed-0"
    make_llama(place / "sft" / "model", character_tokenizer("0123456789+="), hidden=16, layers=1, heads=2)
    few = ["--seeds", 0, "--output", tmp_path, "--json", tmp_path / "found.json", "algorithm.num_steps=1"]
    printed = script(ROOT / "benchmarks" / "preferences.py", "--algorithms", "dpo,reward_model", *few)
    assert "dpo            pairs  50.0% -> " in printed
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [row["step"] for row in results["dpo"][0]["pairs"]] == [0, 1]
    assert len(results["dpo"][0]["answers"]) == 2
    pairs = [json.loads(line) for line in (place / "preferences" / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) > 5000
    for pair in pairs:
        assert str(sum(map(int, pair["prompt"].rstrip("=").split("+")))) == pair["chosen"] != pair["rejected"]
    few += ["algorithm.prompts_per_step=2", "policy.train_global_batch_size=16", "algorithm.validation.samples=4"]
    few += ["policy.scheduler.warmup_steps=0", "--json", curves := tmp_path / "curves.json"]
    script(ROOT / "benchmarks" / "algorithms.py", "--algorithms", "cispo:verl", *few)
    assert (tmp_path / "algorithms.png").stat().st_size > 10_000
    written = (place / "cispo-verl" / "model" / "model.safetensors").stat().st_mtime_ns
    stored = json.loads(curves.read_text())
    stored["accuracy"]["cispo:verl"]["1"] = [[0, 0.25], [1, 0.75]]
    curves.write_text(json.dumps(stored))
    printed = script(ROOT / "benchmarks" / "algorithms.py", "--algorithms", "cispo:verl", *few)
    assert re.search(r"cispo:verl .* by seed +[\d.]+% +75.0%", printed)
    assert json.loads(curves.read_text())["accuracy"] == stored["accuracy"]
    assert (place / "cispo-verl" / "model" / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.thorough
def test_the_benchmark_of_a_gpu_runs_on_a_cpu_and_writes_json(tmp_path):
    few = ["--device", "cpu", "--size", "tiny", "--rounds", 1, "--page", tmp_path / "gpu.md"]
    script(ROOT / "benchmarks" / "gpu.py", *few, "--json", tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    parts, page = written["parts"], (tmp_path / "gpu.md").read_text()
    assert parts.keys() == {"head", "attention", "training", "decoding", "offload", "refit", "profile"}
    assert "errors" not in written
    assert [row["checkpointing"] for row in parts["training"]] == ["False", "False", "selective", "full"]
    assert all(float(row["largest error"]) < 1e-5 for row in parts["head"])
    for name, rows in parts.items():
        assert f"## {name}" in page
        assert all(f"| {' | '.join(row.values())} |" in page for row in rows)


def test_a_failing_part_of_the_benchmark_of_a_gpu_is_reported_and_the_others_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    def head(bench):
        """Raises."""
        raise RuntimeError("CUDA error: invalid argument\nmore lines")

    monkeypatch.setitem(gpu.PARTS, "head", head)
    monkeypatch.setitem(gpu.PARTS, "profile", lambda bench: [["kind"], ["copies"]])
    data = {"machine": {"cpu": "a CPU", "torch": "2.11"}, "matrix_product_flops": 5e14}
    for name in ("head", "profile"):
        gpu.run_part(None, name, data)
    assert data["errors"] == {"head": "RuntimeError: CUDA error: invalid argument\nmore lines"}
    assert data["parts"] == {"profile": [{"kind": "copies"}]}
    assert "Failed: `RuntimeError: CUDA error: invalid argument`" in gpu.page(data)


@pytest.mark.thorough
def test_the_refit_benchmark_checks_that_both_sides_hold_the_same_and_writes_json(tmp_path):
    script(ROOT / "benchmarks" / "refit.py", "--mebibytes", 4, "--rounds", 1, "--json", tmp_path / "refit.json")
    written = json.loads((tmp_path / "refit.json").read_text())
    assert {case["floor"] for case in written["cases"]} == {
        "bare copy",
        "bare copy, memcpy",
        "bare copy, overlapped",
        "bare memcpy, overlapped",
        "bare write",
        "bare write, checksums",
        "bare broadcast",
        "refit, ipc",
        "one forward",
    }
    assert written["proof"]["probes_of_forward"] > 0.0
    assert all(case["ratio"]["median"] > 0.0 for case in written["cases"])


@pytest.mark.parametrize("example", ["calculator", "digits"])
def test_an_override_is_of_both_phases_or_of_one(example, tmp_path, monkeypatch):
    train = runpy.run_path(str(ROOT / "examples" / example / "run.py"))["train"]
    stubs = {"write_data": lambda *_: tmp_path, "make_start": lambda *_: tmp_path}
    given, result = {}, SimpleNamespace(history=[{"validation/accuracy": 0.5}])
    monkeypatch.setattr("rlframework.load_config", lambda file, overrides: given.setdefault(file.stem, overrides))
    monkeypatch.setattr("rlframework.run", lambda config: result)
    with patch.dict(train.__globals__, stubs):
        train(tmp_path, 0, ["policy.precision=bfloat16", "grpo:algorithm.num_steps=5"])
    assert given["sft"][-1] == "policy.precision=bfloat16"
    assert given["grpo"][-2:] == ["policy.precision=bfloat16", "algorithm.num_steps=5"]


@pytest.mark.thorough
def test_the_calculator_trains_on_episodes(tmp_path):
    """No product of a held-out task is among the demonstrations and training tasks."""
    small = ["num_steps=1", "prompts_per_step=2", "samples_per_prompt=2", "validation.samples=4"]
    words = [*(f"grpo:algorithm.{key}" for key in small), "grpo:policy.train_global_batch_size=4"]
    words += ["sft:policy.scheduler.warmup_steps=0", "grpo:policy.scheduler.warmup_steps=0"]
    printed = script(ROOT / "examples/calculator/run.py", "--output", tmp_path, "sft:algorithm.num_steps=2", *words)
    assert "grpo: " in printed
    assert "held-out success" in printed
    data = tmp_path / "seed-0" / "data"
    tasks, held_out = (
        {tuple(sorted(json.loads(line)["prompt"].split("*"))) for line in (data / name).read_text().splitlines()}
        for name in ("tasks.jsonl", "held_out.jsonl")
    )
    assert len(tasks) > 3000
    assert not tasks & held_out
    rows = [json.loads(line) for line in (data / "demonstrations.jsonl").read_text().splitlines()]
    calling = sum("tool_calls" in row["messages"][1] for row in rows) / len(rows)
    assert 0.2 < calling < 0.3


@pytest.mark.thorough
def test_the_digits_are_read_from_images(tmp_path):
    """At a small size, with drawn digits in place of those of scikit-learn; no held-out image is trained on."""
    example, double = str(ROOT / "examples/digits/run.py"), str(Path(__file__).parent / "sklearn_double")
    program = f"import runpy, sys; sys.path.insert(0, {double!r}); runpy.run_path({example!r}, run_name='__main__')"
    small = ["num_steps=1", "prompts_per_step=2", "samples_per_prompt=2", "validation.samples=4"]
    words = [*(f"grpo:algorithm.{key}" for key in small), "grpo:policy.train_global_batch_size=4"]
    words += ["sft:policy.scheduler.warmup_steps=0", "grpo:policy.scheduler.warmup_steps=0"]
    words += ["sft:algorithm.num_steps=1", "sft:algorithm.validation.samples=4"]
    done = run_program(program, "--output", tmp_path, *words, seconds=300)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert [line.split()[0] for line in printed.splitlines() if "held-out accuracy" in line] == ["sft", "grpo"]
    data = tmp_path / "seed-0" / "data"
    train, held_out = (
        {json.loads(line)["image"] for line in (data / name).read_text().splitlines()}
        for name in ("train.jsonl", "held_out.jsonl")
    )
    assert (len(train), len(held_out), len(train & held_out)) == (43, 297, 0)
