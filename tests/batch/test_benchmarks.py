"""The benchmarks of batches and of packing, run at a small size."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from probe_forked import run_program

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PACKING = BENCHMARKS / "packing.py"


@pytest.mark.slow
def test_the_benchmark_measures_every_packer_and_both_assignments(tmp_path):
    words = [PACKING, "--small", "--pairs", 1, "--gsm8k", ROOT / "tests/fixtures/gsm8k_train.jsonl"]
    files = ["--json", tmp_path / "found.json", "--plot", tmp_path / "costs.png"]
    done = run_program(*words, *files)
    assert done.returncode == 0, done.stderr
    assert "lengths in words and punctuation marks" in done.stdout
    assert "first fit decreasing has the bins of a plain scan" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"machine", "sets", "small", "growth"}
    packing = found["sets"]["512 lengths"]["packing"]
    assert len(packing) == 6  # five packers, and both assignments of balanced
    assert all(record["bins"] >= record["bound"] for record in packing)
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")


def test_waiting_by_hand(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKING.parent))
    waiting = runpy.run_path(str(PACKING))["Waiting"].of(np.array([[4.0, 2.0], [3.0, 3.0]]))
    assert (waiting.spread, waiting.total) == (0.0, 7.0)  # both ranks 6; the steps take 4 and 3
    assert waiting.slowest == pytest.approx(7 / 6)


@pytest.mark.thorough
def test_the_data_benchmark(tmp_path):
    done = run_program(BENCHMARKS / "data.py", "--small", "--json", tmp_path / "data.json")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "data.json").read_text())
    names = [line["case"] for line in written["cases"]]
    assert {"shard: plain", "shard: packed balanced", "reorder_data", "from_batches"} <= set(names)
    assert all(line["ratio"]["median"] > 0 and line["size"] == "64x128" for line in written["cases"])
    for name in names:
        assert f"64x128  {name} " in done.stdout
