"""The environment of generation engines, as found by a program that runs in their Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlframework.generation.engine_environment import engine_environment, process_problems
from rlframework.plugins.configure import load_config

COUNTS = """
import json
from pathlib import Path
runs = Path(__file__).with_name("runs")
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
print("something else first")
print(json.dumps({"runs": len(runs.read_text())}))
"""


@pytest.fixture
def run_with():
    """`run_with(workers)`: the configuration of a run with this `generation.workers`."""

    def make(workers):
        values = {"algorithm": {"name": "grpo"}, "environment": {"name": "addition"}, "policy": {"model_name": "m"}}
        return load_config(values | {"generation": {"workers": workers}})

    return make


@pytest.fixture
def program(tmp_path) -> Path:
    file = tmp_path / "describe.py"
    file.write_text(COUNTS)
    return file


def test_a_program_runs_once_in_the_python_of_the_engines(run_with, program):
    for workers in (None, {"group": "ray", "python": sys.executable}):
        assert engine_environment(run_with(workers), program) == {"python": sys.executable, "runs": 1}


def test_a_python_that_does_not_answer_is_named_with_the_reason(run_with, program):
    found = engine_environment(run_with({"group": "ray", "python": "/nowhere/python"}), program)
    assert found["python"] == "/nowhere/python"
    assert "No such file" in found["error"]
    program.write_text("raise SystemExit('no such library')")
    assert "no such library" in engine_environment(run_with(None), program)["error"]


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (None, ["generation.workers is not set. Fast changes the process"]),
        ({"group": "inline"}, ["generation.workers.group is inline. Fast changes the process"]),
        ({"group": "processes"}, []),
    ],
)
def test_an_engine_that_needs_a_process_of_its_own_has_none(run_with, workers, said):
    found = [str(one) for one in process_problems(run_with(workers), "Fast")]
    assert len(found) == len(said)
    assert all(text in one for text, one in zip(said, found, strict=True))
