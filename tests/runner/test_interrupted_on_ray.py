"""Ctrl-C and SIGTERM end a run on a Ray of its own at every point: exit code, a line that says so, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlframework.plugins.configure import config_yaml

FOLDER = Path(__file__).parent
pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("ray"), pytest.mark.timeout(560)]


@pytest.fixture(scope="module")
def seen(make_config, tmp_path_factory):
    """The output of `interrupted_on_ray`, by name of the run."""
    folder = tmp_path_factory.mktemp("interrupted")
    config = make_config(folder, "sft", "algorithm.num_steps=100000", "worker_group.name=ray")
    (folder / "run.yaml").write_text(config_yaml(config))
    path = os.pathsep.join([str(FOLDER.parent / "fixtures"), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(FOLDER / "interrupted_on_ray.py"), str(folder / "run.yaml"), str(folder)],
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        process_group=0,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    return {line["name"]: line for line in lines}


RUNS = {
    "before Ray": (143, "terminated", 0),
    "while Ray starts": (143, "terminated", 0),
    "while Ray starts, Ctrl-C": (130, "interrupted", 0),
    "while workers start": (143, "terminated", 0),
    "in training": (143, "terminated", 0),
    "in training, saving": (143, "interrupted; the checkpoint is in ", 1),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_says_so_and_leaves_nothing(seen, name):
    run, (code, says, checkpoints) = seen[name], RUNS[name]
    assert run["code"] == code
    assert run["stderr"].splitlines()[-1].startswith(says)
    assert "Traceback" not in run["stderr"]
    assert (run["processes"], run["folders"]) == ([], [])
    assert run["checkpoints"] == checkpoints
    assert run["seconds"] < 60
