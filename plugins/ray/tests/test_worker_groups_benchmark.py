"""The benchmark of worker groups runs, checks that all variants give the same results, and writes its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "worker_groups.py"


@pytest.mark.thorough
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped, and looked at, on Linux only")
def test_the_worker_group_benchmark(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [sys.executable, str(SCRIPT), "--small", "--json", str(tmp_path / "groups.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "groups.json").read_text())
    names = {line["case"] for line in written["cases"]}
    assert {"call: 24 MiB each", "answer: 24 MiB each", "call, replicated: 24 MiB", "start of 1 workers"} <= names
    assert all(line["ratio"]["median"] > 0 for line in written["cases"])
    held = written["memory"]
    assert held["bytes of the batch"] <= held["bytes stored"] < 1.1 * held["bytes of the batch"]
    assert held["workers"] == [{"in the object store": True, "copied KiB": 0}]
