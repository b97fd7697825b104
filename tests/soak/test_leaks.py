"""Over a long run, its processes hold no more memory, files, threads, sockets or objects than soon after its start."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_forked import begin_forked

from rlframework import run
from rlframework.configure import config_yaml, load_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BYTES, OBJECTS, OTHERS = 12_000, 0.3, 0.02
"""Bounds of what a step may leave: its line in the history of the run, and next to nothing else."""

COMMON = (
    "plugins=[probe_tasks, probe_usage]",
    "algorithm.validation={every: 20, samples: 4}",
    "checkpoints={every: 10, keep_last: 2, keep_best: 1, metric: train/reward}",
    "recording.every=40",
    "policy.batching.mode=packed",
    "observers.tensorboard=true",
)
GROUPS = {
    "inline": (1000, ["algorithm.loss.kl_coef=0.05"]),
    "processes": (
        200,
        [
            "worker_group={name: processes, num_workers: 2}",
            "generation.workers={num_workers: 1}",
            "policy.lora={rank: 2}",
        ],
    ),
}
"""Steps, and the keys."""


def _run(config: str, temporary: str) -> None:
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = None
    torch.set_num_threads(1)
    run(load_config(config))


def growth(rows: list[dict[str, float]], name: str) -> float:
    """By how much `name` grows with each step, from the median of the second third of the run to that of the last."""
    third = len(rows) // 3
    middle, last = rows[third : 2 * third], rows[-third:]
    steps = last[0]["step"] - middle[0]["step"]
    return (
        statistics.median(row.get(name, 0.0) for row in last) - statistics.median(row.get(name, 0.0) for row in middle)
    ) / steps


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_grows_with_the_steps(run_config: Any, tmp_path: Path, soak: Any, group: str) -> None:
    if not soak.full:
        pytest.skip("memory settles over hundreds of steps, which take minutes: part of make soak")
    steps, options = GROUPS[group]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "run.yaml").write_text(
        config_yaml(run_config("grpo", *COMMON, *options, f"algorithm.num_steps={steps}"))
    )
    process = begin_forked(_run, str(tmp_path / "run.yaml"), str(temporary))
    process.join(500)
    process.kill()  # only one that hangs is still there
    process.join()
    assert process.exitcode == 0
    rows = [json.loads(line) for line in (tmp_path / "usage.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == steps
    grown = {name: growth(rows, name) for row in rows for name in row if name != "step"}
    soak.figures |= {
        "steps": steps,
        "bytes_per_step": round(grown.pop("memory")),
        **{n: rows[-1][n] for n in ("files", "threads")},
    }
    allowed = {name: OBJECTS if name.startswith("objects") else OTHERS for name in grown}
    assert {name: each for name, each in grown.items() if each > allowed[name]} == {}
    assert soak.figures["bytes_per_step"] < BYTES
    assert list(temporary.iterdir()) == []
