"""Workers that are killed together while they write their shards leave only complete checkpoints.

`test_resume.py` does so with one worker, more often, and compares the numbers.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from probe_runs import SHARDED, begin

from rlframework.policy.checkpoint.manifest import check_files
from rlframework.runner.launch import resume
from rlframework.runner.parts import build_parts
from rlframework.training.checkpoints import checkpoints_in

pytestmark = pytest.mark.slow

KILLS = 2


@pytest.fixture
def killed(run_config, tmp_path):
    """`killed(name, seconds)`: a run whose process group is killed `seconds` after its first checkpoint."""

    def kill(name: str, seconds: float) -> Path:
        out = tmp_path / name
        keys = ["algorithm.num_steps=5000", "algorithm.validation={at_start: false, at_end: false}", "plugins=[]"]
        keys += ["checkpoints.every=1", *SHARDED, f"output_dir={out}", "worker_group={name: processes, num_workers: 2}"]
        process = begin(run_config("sft", *keys), tmp_path / f"{name}.yaml")
        until = time.monotonic() + 60.0
        while not checkpoints_in(out) and process.is_alive() and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(seconds)
        assert process.is_alive()
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return out

    return kill


def test_killed_together_at_any_moment_workers_leave_checkpoints_that_are_whole(run_config, killed):
    dice = random.Random(11)
    with build_parts(run_config("sft")) as parts:
        for number in range(KILLS):
            out = killed(f"killed-{number}", dice.uniform(0.0, 0.25))
            for path in checkpoints_in(out):
                check_files(path, required=True)
                parts.policy.load_checkpoint(str(path / "model"), str(path / "optimizer"))
    last = int(checkpoints_in(out)[-1].name.removeprefix("step-"))
    resume(out, [f"algorithm.num_steps={last + 1}"])
    assert checkpoints_in(out)[-1].name == f"step-{last + 1:06d}"
    assert not [path for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]
