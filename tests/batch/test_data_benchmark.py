"""The benchmark of batches runs, checks that both sides of each comparison agree, and writes its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from probe_forked import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data.py"


@pytest.mark.thorough
def test_the_data_benchmark(tmp_path):
    done = run_program(SCRIPT, "--small", "--json", tmp_path / "data.json")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "data.json").read_text())
    names = [line["case"] for line in written["cases"]]
    assert {"shard: plain", "shard: packed balanced", "reorder_data", "from_batches"} <= set(names)
    assert all(line["ratio"]["median"] > 0 and line["size"] == "64x128" for line in written["cases"])
    for name in names:
        assert f"64x128  {name} " in done.stdout
