"""Whole runs in one process: their files, and that they learn."""

from __future__ import annotations

import json
import random

import pytest
import torch
from chat_formats import TOOLS
from probe_runs import rows_of
from safetensors.torch import load_file

from rlframework import load_config, resume, run
from rlframework.base.errors import ConfigError, DataError
from rlframework.datasets.chat.chat_template import apply_template
from rlframework.rollout.seeds import row_seeds
from rlframework.runner.parts import build_generation

pytestmark = pytest.mark.slow


def test_a_run_leaves_model_metrics_samples_and_configuration(run_config, tmp_path):
    """The rows of metrics have the times of the phases; samples name the run."""
    config = run_config("grpo", "algorithm.loss.kl_coef=0.05", "observers.tensorboard=true", "observers.curve=true")
    result = run(config)
    out = tmp_path / "run"
    assert {path.name for path in out.iterdir()} >= {
        "config.yaml", "model", "metrics.jsonl", "samples.jsonl", "tensorboard", "curve.png",
    }  # fmt: skip
    assert load_config(out / "config.yaml") == config
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [("validation/accuracy" in row) for row in rows] == [True, False, True, True]
    assert all(("time/validation" in row) == ("validation/accuracy" in row) for row in rows)
    for row in rows[1:]:
        assert {"train/reward", "train/kl", "train/entropy", "train/generation_kl"} <= row.keys()
        assert 0.0 < row["time/generate"] + row["time/logprobs"] + row["time/train"] <= row["time/step"]
    assert result.metrics["step"] == 3
    environment, samples = json.loads((out / "environment.json").read_text()), rows_of(out / "samples.jsonl")
    assert {"prompt", "completion", "reward", "step", "kind"} <= samples[0].keys()
    assert {sample["run"] for sample in samples} == {environment["run_id"]}
    assert {sample["kind"] for sample in samples} == {"train", "validation"}
    assert "probe_tasks" in {plugin["distribution"].split(" ")[-1] for plugin in environment["plugins"]}
    assert load_config(config, [f"policy.model_name={out}/model"]).policy.model_name.endswith("model")


def test_global_random_numbers_follow_from_the_seed(run_config, tmp_path):
    """Those of the driver and of each worker, whatever was drawn before."""
    random.seed(99)
    torch.manual_seed(99)
    run(run_config("sft", "worker_group={name: processes, num_workers: 2}", "checkpoints.every=3"))
    [checkpoint] = (tmp_path / "run" / "checkpoints").iterdir()
    driver = json.loads((checkpoint / "run.json").read_text())["random"]
    assert driver["python"][1] == list(random.Random(3).getstate()[1])
    assert driver["torch"] == torch.Generator().manual_seed(3).get_state().numpy().tobytes().hex()
    workers = load_file(checkpoint / "optimizer" / "random.safetensors")
    assert all(torch.equal(workers[f"cpu.{rank}"], torch.Generator().manual_seed(rank).get_state()) for rank in (0, 1))


def test_the_template_of_a_trained_model_is_not_warned_about_again(run_config, tmp_path, tiny_llama, caplog):
    """The template writes tool calls, and not the tools."""
    run(run_config("sft", "algorithm.validation={at_start: false, at_end: false}", "checkpoints.every=3"))
    folder = tmp_path / "run"
    logged = []
    for number, model in enumerate((folder / "model", folder / "checkpoints" / "step-000003" / "model", tiny_llama)):
        caplog.clear()
        with build_generation(run_config("sft", f"policy.model_name={model}")) as (tokenizer, *_):
            tokenizer.chat_template = (
                "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}" + "\n" * number
            )
            apply_template(tokenizer, [{"role": "user", "content": "1+1="}], TOOLS)
        logged.append(caplog.text.count("the chat template writes tool calls but not the tools"))
    assert logged == [0, 0, 1]


def test_several_optimizer_steps_on_a_batch_start_from_its_own_policy(run_config, tmp_path):
    run(run_config("grpo", "algorithm.epochs_per_batch=2", "policy.train_global_batch_size=16"))
    rows = rows_of(tmp_path / "run")
    assert all(row["time/logprobs"] > 1e-3 for row in rows[1:])  # it scored the batch before training
    assert any(abs(row["train/ratio"] - 1.0) > 1e-6 for row in rows[1:])  # and moved away from it


def test_the_schedule_spans_all_passes_over_the_batches(run_config, tmp_path):
    options = ["algorithm.epochs_per_batch=2", "policy.scheduler={name: linear, min_ratio: 0.0}"]
    run(run_config("grpo", *options, "policy.optimizer.lr=6e-3"))
    rates = [row["train/lr"] for row in rows_of(tmp_path / "run")[1:]]
    assert rates == pytest.approx([5e-3, 3e-3, 1e-3])  # of the second pass of each step: calls 2, 4 and 6 of 6


@pytest.mark.parametrize("passes", [1, 2])
def test_groups_of_equal_rewards_are_counted_and_are_no_work(run_config, tmp_path, passes, caplog):
    run(run_config("grpo", "environment.constant=true", f"algorithm.epochs_per_batch={passes}"))
    for row in rows_of(tmp_path / "run")[1:]:
        assert row["train/zero_variance_groups"] == 4
        assert row["train/global_valid_toks"] == row["train/grad_norm"] == 0
        assert "train/ratio" not in row  # nothing was trained on
    assert caplog.text.count("in each of the 4 groups all rewards are equal (all are ") == 1


def test_answers_that_are_cut_are_warned_about_once(run_config, tmp_path, caplog):
    run(run_config("grpo", "generation.max_new_tokens=1"))
    fractions = [row["train/truncated_fraction"] for row in rows_of(tmp_path / "run")[1:]]
    assert sum(fraction > 0.5 for fraction in fractions) > 1
    assert caplog.text.count("of the answers were truncated: they reached generation.max_new_tokens=1. They are") == 1
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert any(sample.get("truncated") for sample in samples)
    assert all(sample["prompt"] in sample["model_input"] for sample in samples)


def test_rows_have_seeds_of_their_own():
    seeds = torch.cat([row_seeds(0, 1, 50), row_seeds(0, 2, 50), row_seeds(1, 1, 50)])
    assert len(set(seeds.tolist())) == 150
    assert torch.equal(row_seeds(0, 1, 50)[:10], row_seeds(0, 1, 10))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.model_name=/no/such/model"], "/no/such/model"),
        (["~environment", "environment={name: gsm8k, train_path: /no/such/file.jsonl}"], "/no/such/file.jsonl"),
        (["~environment", "environment={name: gsm8k, train_path: bad.jsonl}"], "bad.jsonl, line 2"),
        (["~environment", "environment={name: gsm8k, train_path: empty.jsonl}"], "empty.jsonl"),
        (["generation.stop_strings=[ab]"], "stop_strings"),
    ],
)
def test_bad_input_is_one_error_and_leaves_nothing(run_config, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"question": "1+1?", "answer": "2\\n#### 2"}\n{"question": "broken\n')
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises((ConfigError, DataError)) as error:
        run(run_config("grpo", *overrides))
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


RESUMED = ["checkpoints.every=2", "algorithm.num_steps=2", "policy.optimizer.lr=1.0e-3"]


@pytest.mark.parametrize(
    ("scheduler", "rates", "noted"),
    [
        ("{name: cosine, warmup_steps: 1}", [0.0, 1.0, 0.75, 0.25], True),
        ("{name: linear, total_steps: 4}", [1.0, 0.75, 0.5, 0.25], False),
    ],
)
def test_a_schedule_that_follows_the_steps_is_noted_when_a_resume_changes_them(
    run_config, tmp_path, caplog, scheduler, rates, noted
):
    """A resume without a change notes nothing."""
    run(run_config("sft", *RESUMED, f"policy.scheduler={scheduler}"))
    caplog.set_level("INFO")
    resume(tmp_path / "run")
    assert "scheduler" not in caplog.text
    resume(tmp_path / "run", ["algorithm.num_steps=4"])
    assert [row["train/lr"] for row in rows_of(tmp_path / "run")[1:]] == pytest.approx([1e-3 * rate for rate in rates])
    now = "ends with the run, now at step 4 (algorithm.num_steps 2 -> 4): the learning rates after step 2 are those of"
    assert (now in caplog.text) == noted
    assert ("Set policy.scheduler.total_steps to keep another end" in caplog.text) == noted
