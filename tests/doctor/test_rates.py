"""The expected ratio of engines to trainers, against numbers by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlframework.configure import config_yaml
from rlframework.doctor.checks import Level
from rlframework.doctor.rates import Rates, expected, print_measured, rates_of
from rlframework.errors import UserError
from rlframework.observers.report.runs import read_run

APART = "generation.workers={group: processes, num_workers: 2}"


def row(step: int, seconds: float, engines: list[float], waits: float, **more: Any) -> dict[str, Any]:
    """A line of the timeline: the trainer waits, then trains; `engines` are busy for these seconds."""
    trainer = [["generate", 0.0, waits], ["train", waits, seconds], *more.pop("trainer", ())]
    lanes = {f"engine {number}": [["generate", 0.0, busy]] for number, busy in enumerate(engines)}
    busy = {f"engine {number}": busy for number, busy in enumerate(engines)}
    return {"step": step, "seconds": seconds, "lanes": {"trainer": trainer, **lanes, **more}, "busy": busy}


def written(folder: Path, config: Any, rows: list[dict[str, Any]]) -> Any:
    """A run of `config` with these lines, whose completions have 10 tokens."""
    metrics = [{"step": each["step"], "train/completion_length": 10.0} for each in rows]
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
    rates = Rates("it", trainer=1.0, engine=6.0, token=0.15, rows=16, workers=2, setup=setup)
    ratio, staleness = expected(config, rates)
    assert (ratio.level, ratio.remedy) == (Level.WARNING, "generation.workers.num_workers=3")
    assert "E / T = 12 s / 4 s = 3 engines for 1 trainer worker(s)" in ratio.text
    assert "with the configured 2, the trainer waits in 33% of the time" in ratio.text  # a step takes 6 s
    assert staleness.level is Level.WARNING
    assert "K >= 2 L / S = 2 * 15 s / 6 s, so max_staleness 5 hides generation" in staleness.text
    good = run_config("grpo", APART, "generation.workers.num_workers=3", "algorithm.async={max_staleness: 8}")
    other, *findings = expected(good, Rates("it", 1.0, 6.0, 0.15, 16, 2, setup | {"backend": "other"}))
    assert other.text == "the rates are of a run with another backend: it"
    assert [finding.level for finding in findings] == [Level.OK, Level.OK]
    turns = run_config("grpo")
    ratio, staleness = expected(turns, rates)
    assert ratio.remedy == "Engines of their own: generation.workers={group: processes, num_workers: 3}"
    assert "training and generation take turns" in staleness.text


@pytest.mark.slow
def test_a_short_run_of_the_configuration_is_measured(
    run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config("grpo", "generation.workers={group: processes, num_workers: 1}", "algorithm.async={}")
    (tmp_path / "run.yaml").write_text(config_yaml(config))
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "run.yaml"), "algorithm.num_steps=7"])
    print_measured()
    found = Rates(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found.source == "measured now in 4 steps, steps 2 to 4"
    assert found.rows == 32
    assert min(found.trainer, found.engine, found.token) > 0
    assert not config.output_dir.exists()
