"""The comparison with other frameworks: its checks and its pipes, and a small run beside the plain loop."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from probe_forked import run_program

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
STEPS = """
import sys; sys.path.insert(0, {folder!r})
from steps import serve, steps
steps().ready(versions={{}})
count = iter(range(9))
serve(lambda: print("a log") or next(count), lambda result: {{"loss": result}})
"""


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ({"loss": 2.00005, "grad_norm": 3.0}, {"loss": pytest.approx(5e-5), "grad_norm": 0.0}),
        ({"loss": 2.001, "grad_norm": 3.0}, "train: loss of rlframework and of X differ by 1.0e-03"),
        ({"loss": 2.0, "grad_norm": 3.03}, "train: grad_norm of rlframework and of X differ by 1.0e-02"),
        ({"loss": float("nan"), "grad_norm": 3.0}, "train: loss of rlframework and of X differ by nan"),
        ({}, "train: nothing to compare X by"),
    ],
)
def test_a_difference_beyond_its_tolerance_ends_the_program(monkeypatch, theirs, found):
    monkeypatch.syspath_prepend(str(PEERS.parent))
    compare = runpy.run_path(str(PEERS / "run.py"))["compare"]
    ours = {"loss": 2.0, "grad_norm": 3.0, "seconds": 1.0}
    if isinstance(found, dict):
        assert compare("train", "X", ours, theirs) == found
    else:
        with pytest.raises(SystemExit, match=found):
            compare("train", "X", ours, theirs)


def test_a_worker_answers_a_line_with_a_step_and_ends_with_its_input():
    words = [sys.executable, "-c", STEPS.format(folder=str(PEERS))]
    done = subprocess.run(words, input="\n" * 4, capture_output=True, text=True, timeout=60, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[:2] == [{"versions": {}}, {}]
    assert [answer["loss"] for answer in answers[2:]] == [0, 1, 2]
    assert all(0.0 <= answer["seconds"] < 1.0 for answer in answers[2:])
    assert done.stderr.count("a log") == 3


@pytest.mark.thorough
@pytest.mark.slow
def test_it_runs_beside_the_plain_loop_and_writes_json(tmp_path):
    few = ["--works", "logprobs", "dpo", "--sides", "plain", "--pairs", 1, "--rows", 8, "--longest", 70]
    done = run_program(PEERS / "run.py", *few, "--json", tmp_path / "peers.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "peers.json").read_text())["results"]
    assert list(results) == ["logprobs, even lengths", "dpo, even lengths"]
    for found in results.values():
        assert list(found["seconds"]) == ["rlframework", "plain loop, padded", "plain loop, sorted"]
        assert all(ratio["median"] > 0 for ratio in found["ratios"].values())
        assert all(found["differences"][name] for name in found["ratios"])
