"""An asynchronous run loses and repeats no prompt, however often its engine, reward process and driver are killed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_forked import run_forked
from probe_runs import rows_of
from probe_usage import growth

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.datasets.loader import PromptLoader
from rlframework.plugins.configure import config_yaml, load_config
from rlframework.runner.launch import resume

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(3600)]

BOUND, PROMPTS, ROWS, SEED, EVERY = 2, 4, 37, 3, 10
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
"""Quantities that a life of the driver may gain for a while: the rest of what `probe_usage` counts is constant."""
DRIVER = 16_000
"""Bytes that a step may leave in the driver: the metrics of a step in its history, and a new engine every 50 steps."""


def _live(out: Path, config: Path) -> None:
    """Be the driver, the leader of a process group."""
    os.setsid()
    tempfile.tempdir = None  # that of the environment
    torch.set_num_threads(1)
    if checkpoints_in(out):
        resume(out, trust_run=True)
    else:
        run(load_config(config))


@pytest.fixture
def temporary() -> Iterator[str]:
    """The directory for temporary files of the driver's lives, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_nothing_is_lost_when_engines_rewards_and_the_driver_are_killed(
    run_config: Any, tmp_path: Path, soak: Any, monkeypatch: pytest.MonkeyPatch, temporary: str
) -> None:
    """Each step trains the prompts of an undisturbed run, also when it is repeated, none staler than the bound."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "digits.py").write_text(REWARD)
    rows = [{"prompt": f"{number}?", "answer": "1"} for number in range(10, 10 + ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text('{"prompt": "0?", "answer": "0"}\n')
    data = "{name: dataset, path: rows.jsonl, validation_path: held.jsonl, reward: 'digits:score'}"
    steps, kills = (2000, "50 70") if soak.full else (8, "3 5")
    deaths = sorted(soak.random().sample(range(EVERY + 1, steps // 2), soak.times(0, 5)))
    options = (*SETTINGS, f"algorithm.num_steps={steps}", f"checkpoints={{every: {EVERY}, keep_last: 2}}")
    config, out = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(config_yaml(run_config("grpo", *options, "~environment", f"environment={data}")))
    plan = {"KILLS": kills, "DEATHS": " ".join(map(str, deaths)), "TMPDIR": temporary}
    for ends in [-signal.SIGKILL] * len(deaths) + [0]:
        life = run_forked(_live, out, config, folder=tmp_path, environment=plan, seconds=soak.times(300, 3000))
        assert life.returncode == ends, life.stderr
    trained: dict[int, Counter[str]] = {}
    for row in rows_of(out / "samples.jsonl"):
        trained.setdefault(row["step"], Counter())[row["prompt"]] += 1
    loader = PromptLoader([row["prompt"] for row in rows], PROMPTS, SEED)
    times = {step: found.total() // (4 * PROMPTS) for step, found in trained.items()}  # more than 1 if repeated
    # a step at the end of an epoch may have a prompt twice
    assert trained == {step: Counter(list(next(loader)) * 4 * times[step]) for step in range(1, steps + 1)}
    assert all(times[step] == 1 for step in range(max(deaths, default=0) + 1, steps + 1))
    metrics = rows_of(out)
    assert max(row["async/staleness_max"] for row in metrics) <= BOUND
    assert sum(row["async/failed_groups"] for row in metrics) == 0
    killed = Counter(line.split()[1] for line in (tmp_path / "kills.txt").read_text().splitlines())
    for name, each in zip(("engine", "reward"), kills.split(), strict=True):
        assert killed[name] >= max(1, steps // int(each) - 1)
    soak.figures |= {"steps": steps, "lives": 1 + len(deaths), "engines": killed["engine"], "rewards": killed["reward"]}
    if soak.full:
        usage = list(map(json.loads, (tmp_path / "usage.jsonl").read_text().splitlines()))
        _check_constant([row for row in usage if row["step"] > deaths[-1]][5:], soak)


def _check_constant(usage: list[dict[str, float]], soak: Any) -> None:
    grown = {name: growth(usage, name) for row in usage for name in row if name != "step"}
    soak.figures |= {"files": usage[-1]["files"], "bytes_per_step": round(grown["memory 0"])}
    assert grown["memory 0"] <= DRIVER
    assert {name: each for name, each in grown.items() if each > 0.02 and not name.startswith(FORGOTTEN)} == {}
