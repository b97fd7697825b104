"""The declared layout of memory against bytes that exist in training, on a group that exchanges nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import counted_training
import pytest
from counted_training import Case
from probe_forked import run_program

HALF = {"precision": "bfloat16"}
NONE_SMALL = {"stage3_param_persistence_threshold": 0}
"""No weight stays whole because it is small."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("deepspeed", {"zero_optimization": {"stage": 2}}),
        Case("deepspeed", {"zero_optimization": {"stage": 0}}, HALF),
        Case("deepspeed", {"zero_optimization": {"stage": 1}}, HALF),
        Case("deepspeed", {"zero_optimization": {"stage": 2}}, HALF),
        Case("deepspeed", {"zero_optimization": {"stage": 3, **NONE_SMALL}}, HALF),
    ],
    ids=str,
)
def test_the_estimate_is_what_exists(tmp_path, case):
    model = counted_training.make_model(tmp_path / "model")
    done = run_program(Path(counted_training.__file__), json.dumps(asdict(case)), model)
    assert done.returncode == 0, done.stderr[-2000:]
    always, most = json.loads(done.stdout.splitlines()[-1])
    assert always == pytest.approx(1.0, rel=0.005)
    assert 0.98 < most < 1.35
