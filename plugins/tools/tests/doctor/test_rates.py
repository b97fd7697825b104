"""The expected ratio of engines to trainers, against numbers by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlframework.base.errors import UserError
from rlframework.observers.runs import read_run
from rlframework.plugins.configure import config_yaml
from rlframework_tools.doctor import rates
from rlframework_tools.doctor.rates import Rates, expected, print_measured, rates_of

APART = "generation.workers={group: processes, num_workers: 2}"


def row(step: int, seconds: float, engines: list[float], waits: float, **more: Any) -> dict[str, Any]:
    """A line of the timeline: the trainer waits, then trains; `engines` are busy for these seconds."""
    trainer = [["generate", 0.0, waits], ["train", waits, seconds], *more.pop("trainer", ())]
    lanes = {f"engine {number}": [["generate", 0.0, busy]] for number, busy in enumerate(engines)}
    busy = {f"engine {number}": busy for number, busy in enumerate(engines)}
    return {"step": step, "seconds": seconds, "lanes": {"trainer": trainer, **lanes, **more}, "busy": busy}


def written(folder: Path, config: Any, rows: list[dict[str, Any]], **more: float) -> Any:
    """A run of `config` with these lines, whose completions have 10 tokens, and the training metrics `more`."""
    train = {"completion_length": 10.0, **more}
    metrics = [{"step": each["step"], **{f"train/{name}": value for name, value in train.items()}} for each in rows]
    folder.mkdir(exist_ok=True)
    for name, lines in (("metrics", metrics), ("timeline", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(config_yaml(config))
    return read_run(folder, "r")


def test_rates_are_those_of_the_steps_after_the_first_without_validation(run_config: Any, tmp_path: Path) -> None:
    config = run_config("grpo", APART, "generation.batch_size=8")  # 4 prompts, 8 answers each
    rows = [
        row(1, 100.0, [90.0, 90.0], 90.0, refits=[["refit", 0.0, 0.1]]),
        row(2, 10.0, [4.0, 2.0], 4.0),
        row(3, 50.0, [30.0, 30.0], 4.0, trainer=[["validation", 20.0, 50.0]]),
        row(4, 12.0, [6.0, 4.0], 6.0),
    ]
    found = rates_of(written(tmp_path / "run", config, rows), "it")
    assert (found.source, found.rows, found.workers) == ("it, steps 2 to 4", 32, 1)
    assert (found.trainer, found.engine) == (6.0, 8.0)
    assert found.token == pytest.approx(8.0 * 8 / 320)  # an engine decodes 8 of its 16 rows at a time
    with pytest.raises(UserError, match="has no rates"):
        rates_of(written(tmp_path / "short", config, rows[:1]), "it")


def test_engines_inside_the_trainer_s_workers_share_a_lane(run_config: Any, tmp_path: Path) -> None:
    config = run_config("grpo", "worker_group={name: processes, num_workers: 2}")
    found = rates_of(written(tmp_path / "run", config, [row(1, 9.0, [9.0], 9.0), row(2, 7.0, [4.0], 4.0)]), "it")
    assert (found.trainer, found.engine, found.workers) == (3.0, 8.0, 2)
    assert found.token == pytest.approx(8.0 * 16 / 320)  # all 16 rows of an engine at a time


def test_the_ratio_and_the_staleness_that_hides_generation(run_config: Any) -> None:
    """Rates of 16 rows and 2 workers; the run has 32 rows and 1 worker: T = 2 * 2 * 1 s and E = 2 * 6 s."""
    config = run_config("grpo", APART, "generation.max_new_tokens=100", "algorithm.async={max_staleness: 2}")
    setup = {
        "model": config.policy.model_name,
        "backend": config.policy.backend,
        "generation engine": "transformers",
        "device": config.device,
    }
    given = Rates("it", trainer=1.0, engine=6.0, token=0.15, rows=16, workers=2, setup=setup)
    ratio, staleness = expected(config, given)
    assert (ratio.level, ratio.remedy) == ("warning", "generation.workers.num_workers=3")
    assert "E / T = 12 s / 4 s = 3 engines for 1 trainer worker(s)" in ratio.text
    assert "with the configured 2, the trainer waits in 33% of the time" in ratio.text  # a step takes 6 s
    assert staleness.level == "warning"
    assert "K >= 2 L / S = 2 * 15 s / 6 s, so max_staleness 5 hides generation" in staleness.text
    good = run_config("grpo", APART, "generation.workers.num_workers=3", "algorithm.async={max_staleness: 8}")
    other, *findings = expected(good, Rates("it", 1.0, 6.0, 0.15, 16, 2, setup | {"backend": "other"}))
    assert other.text == "the rates are of a run with another backend: it"
    assert [finding.level for finding in findings] == ["ok", "ok"]
    turns = run_config("grpo")
    ratio, staleness = expected(turns, given)
    assert ratio.remedy == "Engines of their own: generation.workers={group: processes, num_workers: 3}"
    assert "training and generation take turns" in staleness.text


@pytest.mark.slow
def test_steps_without_training_have_no_rates(run_config: Any, tmp_path: Path) -> None:
    """As with random weights, whose rewards are all 0: the trainer does next to nothing, and refits nothing."""
    config, rows = run_config("grpo", APART), [row(1, 9.0, [9.0], 9.0), row(2, 7.0, [4.0], 6.9)]
    with pytest.raises(UserError, match="no step was trained, because the rewards of each group were equal"):
        rates_of(written(tmp_path / "none", config, rows, global_valid_toks=0.0, zero_variance_groups=4.0), "it")
    found = rates_of(written(tmp_path / "some", config, rows, global_valid_toks=9.0, zero_variance_groups=3.0), "it")
    assert found.skipped == 0.75  # of 4 groups
    first, *_ = expected(config, found)
    assert "75% of the groups had equal rewards and were not trained on" in first.text
    trained = run_config("grpo", APART, "algorithm.skip_zero_variance=false")
    assert rates_of(written(tmp_path / "all", trained, rows, zero_variance_groups=3.0), "it").skipped == 0.0


@pytest.mark.slow
def test_dynamic_sampling_generates_several_times_the_rows(run_config: Any, tmp_path: Path) -> None:
    config = run_config("grpo", "algorithm.dynamic_sampling=3")
    rows = [row(1, 9.0, [9.0], 9.0), row(2, 7.0, [4.0], 4.0)]
    found = rates_of(written(tmp_path / "run", config, rows, sampling_rounds=2.0), "it")
    assert found.token == pytest.approx(4.0 * 32 / 640)


@pytest.mark.slow
def test_a_short_run_of_the_configuration_is_measured(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its groups are trained on, and each step refits, though no answer to a sum is right."""
    addition = ("~environment", "environment={name: addition, digits: 2}", "policy.scheduler={warmup_steps: 5}")
    workers = "generation.workers={group: processes, num_workers: 1}"
    config = run_config("grpo", workers, "algorithm.async={}", *addition)
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "run.yaml"), "algorithm.num_steps=7"])
    seen = list[Any]()
    monkeypatch.setattr(rates, "rates_of", lambda run, source: seen.append(run) or rates_of(run, source))
    print_measured()
    found = Rates(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found.source == "measured now in 4 steps, steps 2 to 4"
    assert found.rows == 32
    assert min(found.trainer, found.engine, found.token) > 0
    assert found.skipped == 0.0
    assert not config.output_dir.exists()
    (measured,) = seen
    assert [row["train/zero_variance_groups"] for row in measured.history if row["step"] > 1] == [4.0] * 3
    assert all(row["train/global_valid_toks"] > 0 for row in measured.history if row["step"])
    assert all("refits" in line.lanes for line in measured.timeline)
