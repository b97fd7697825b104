"""Over a long run, its processes hold no more memory, files, threads, sockets or objects than soon after its start."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_forked import begin_forked
from probe_usage import growth

from rlframework import run
from rlframework.plugins.configure import config_yaml, load_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OBJECTS, OTHERS = 0.3, 0.02
"""Bounds of what a step may leave: next to nothing."""
DRIVER = 8_000
"""Bytes that a step may leave in the driver: a dict of its metrics in the run's history, measured as 4,100 to 4,800."""
WORKER = 4_000
"""Bytes that a step may leave in any other process, less than a page.

In 800 steps the heap in use of a policy's worker grows by 30 bytes a step, and the number of its Python objects not at
all; but glibc's arenas spread for the first 250 steps. So 200 steps show 7,000 to 8,400 bytes, and 500 show 360 to
1,740, mostly pages that `free` has not given back yet.
"""

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
        500,
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
        "bytes_per_step": [round(each) for name, each in sorted(grown.items()) if name.startswith("memory")],
        **{n: rows[-1][n] for n in ("files", "threads")},
    }
    allowed = {"memory": WORKER, "objects": OBJECTS}
    bounds = {name: allowed.get(name.partition(" ")[0], OTHERS) for name in grown}
    bounds["memory 0"] = DRIVER + (WORKER if group == "inline" else 0)  # then its worker is in the driver
    assert {name: each for name, each in grown.items() if each > bounds[name]} == {}
    assert list(temporary.iterdir()) == []
