"""The benchmark of packing, run at a small size."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from probe_forked import run_program

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "packing.py"


@pytest.mark.slow
def test_the_benchmark_measures_every_packer_and_both_assignments(tmp_path):
    words = [SCRIPT, "--small", "--pairs", 1, "--gsm8k", ROOT / "tests/fixtures/gsm8k_train.jsonl"]
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
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    waiting = runpy.run_path(str(SCRIPT))["Waiting"].of(np.array([[4.0, 2.0], [3.0, 3.0]]))
    assert (waiting.spread, waiting.total) == (0.0, 7.0)  # both ranks 6; the steps take 4 and 3
    assert waiting.slowest == pytest.approx(7 / 6)
