"""The benchmark of batches runs: it checks that both sides of each line give the same, and writes its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data.py"


def run(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=True, env=environment).stdout


def test_the_data_benchmark(tmp_path):
    printed = run("--small", "--json", tmp_path / "data.json")
    written = json.loads((tmp_path / "data.json").read_text())
    names = [line["case"] for line in written["cases"]]
    assert {"shard: plain", "shard: packed balanced", "reorder_data", "from_batches", "to another process"} <= set(
        names
    )
    assert all(line["ratio"]["median"] > 0 and line["size"] == "64x128" for line in written["cases"])
    for name in names:
        assert f"64x128  {name} " in printed
