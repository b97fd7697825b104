"""An asynchronous run loses and repeats no prompt, however often its engine, reward process and driver are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_forked import begin_forked
from probe_runs import rows_of
from probe_usage import growth

from rlframework import run
from rlframework.configure import config_yaml, load_config
from rlframework.datasets.loader import PromptLoader
from rlframework.runner.launch import resume
from rlframework.training.checkpoints import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

BOUND, PROMPTS, ROWS, SEED = 2, 4, 37, 3
SETTINGS = (
    "plugins=[probe_usage, probe_kills]",
    "generation.workers.group=processes",
    f"algorithm.async={{max_staleness: {BOUND}}}",
    f"algorithm.prompts_per_step={PROMPTS}",
    "algorithm.samples_per_prompt=4",
    "algorithm.validation={at_start: false, at_end: false, every: 0}",
    "observers.samples=1000",
)
REWARD = """
def score(completion):
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion))
"""
FORGOTTEN = ("memory", "objects")
"""What a life of the driver may gain for a while: the rest of what `probe_usage` counts is constant."""
DRIVER = 16_000
"""Bytes that a step may leave in the driver: the metrics of a step in its history, and a new engine every 50 steps."""


def _live(folder: str, config: str, kills: str) -> None:
    """Be the driver, the leader of a process group."""
    os.setsid()
    os.environ["KILLS"] = kills
    torch.set_num_threads(1)
    os.chdir(folder)
    out = Path(folder, "run")
    if checkpoints_in(out):
        resume(out, trust_run=True)
    else:
        run(load_config(config))


def _steps(out: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints_in(out)]


def test_nothing_is_lost_when_engines_rewards_and_the_driver_are_killed(
    run_config: Any, tmp_path: Path, soak: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step trains the prompts of an undisturbed run, none staler than the bound."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "digits.py").write_text(REWARD)
    rows = [{"prompt": f"{number}?", "answer": "1"} for number in range(10, 10 + ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text('{"prompt": "0?", "answer": "0"}\n')
    data = "{name: dataset, path: rows.jsonl, validation_path: held.jsonl, reward: 'digits:score'}"
    allowed = "environment.max_reward_failures=1.0"  # what was being scored when its process was killed
    steps, every = soak.times(8, 2000), soak.times(1, 10)
    deaths = [soak.random().randrange(1, steps // 2) for _ in range(soak.times(1, 5))]
    kills = "50 70" if soak.full else "3 5"
    options = (*SETTINGS, f"algorithm.num_steps={steps}", f"checkpoints={{every: {every}, keep_last: 2}}")
    config, out = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(config_yaml(run_config("grpo", *options, "~environment", f"environment={data}", allowed)))
    lives, begun = 0, 0
    for death in [*sorted(deaths), None]:
        begun, lives = max(_steps(out), default=0), lives + 1
        process = begin_forked(_live, str(tmp_path), str(config), kills)
        if death is None:
            process.join(6000)
            assert process.exitcode == 0
            break
        while process.is_alive() and max(_steps(out), default=0) < death:
            time.sleep(0.02)
        assert process.exitcode is None, "the run ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    trained: dict[int, Counter[str]] = {}
    for row in rows_of(out / "samples.jsonl"):
        trained.setdefault(row["step"], Counter())[row["prompt"]] += 1
    loader = PromptLoader([row["prompt"] for row in rows], PROMPTS, SEED)
    assert trained == {step: Counter(dict.fromkeys(next(loader), 4)) for step in range(1, steps + 1)}
    metrics = rows_of(out)
    assert max(row["async/staleness_max"] for row in metrics) <= BOUND
    assert sum(row["async/failed_groups"] for row in metrics) == 0
    killed = Counter(line.split()[1] for line in (tmp_path / "kills.txt").read_text().splitlines())
    assert killed["engine"] >= steps // int(kills.split()[0]) - 1
    usage = [row for row in map(json.loads, (tmp_path / "usage.jsonl").read_text().splitlines()) if row["step"] > begun]
    soak.figures |= {"steps": steps, "lives": lives, "engines": killed["engine"], "rewards": killed["reward"]}
    if soak.full:
        _check_constant(usage[5:], soak)


def _check_constant(usage: list[dict[str, float]], soak: Any) -> None:
    grown = {name: growth(usage, name) for row in usage for name in row if name != "step"}
    soak.figures |= {"files": usage[-1]["files"], "bytes_per_step": round(grown["memory 0"])}
    assert grown["memory 0"] <= DRIVER
    assert {name: each for name, each in grown.items() if each > 0.02 and not name.startswith(FORGOTTEN)} == {}
