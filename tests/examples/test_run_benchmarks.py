"""Benchmarks: the checks, pipes and a small run of the comparison with other frameworks; a GPU's figures, by hand."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from probe_forked import run_program
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS, GPU = BENCHMARKS / "peers", BENCHMARKS / "gpu.py"
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


@pytest.mark.slow  # it imports the script
def test_kernels_are_counted_without_the_ranges_of_annotations_around_them(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU.parent))
    kernel_rows = runpy.run_path(str(GPU))["kernel_rows"]
    kernels = [  # milliseconds; the copy runs beside the product
        ("ampere_bf16_gemm", 0, 30), ("Memcpy DtoD", 10, 20), ("flash_fwd", 40, 60), ("silu_kernel", 60, 70)
    ]  # fmt: skip
    ranges = [("forward", 0, 70), ("attention", 40, 60)]
    events = [_event(name, start, stop) for name, start, stop in kernels]
    events += [_event(name, start, stop, is_user_annotation=True) for name, start, stop in ranges]
    events += [_event("aten::mm", 0, 90, device_type=DeviceType.CPU)]
    top, *rows = kernel_rows(events, 0.1)
    assert top == ["kind", "ms", "share"]
    assert {kind: (ms, share) for kind, ms, share in rows} == {
        "attention": ("20.0", "20%"),
        "matrix products": ("30.0", "30%"),
        "communication": ("0.0", "0%"),
        "optimizer": ("0.0", "0%"),
        "copies": ("10.0", "10%"),
        "elementwise": ("10.0", "10%"),
        "idle": ("40.0", "40%"),  # from 30 to 40 and from 70 on
    }


def _event(name, start, stop, **kind):
    times = {"start_us": 1000 * start, "end_us": 1000 * stop, "id": 1, "thread": 0}
    return FunctionEvent(name=name, **times, **{"device_type": DeviceType.CUDA, **kind})
