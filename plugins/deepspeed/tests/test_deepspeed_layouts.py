"""A step of several workers beside the oracle's, for each stage of ZeRO and each way to split a model.

The whole suite in these layouts is in `make conformance` (tests/conformance/all_parts.py).
"""

from __future__ import annotations

import pytest

from rlframework.conformance import PolicyWorkerSuite
from rlframework.conformance.layouts import Layout
from rlframework.plugins.manager import create_manager

CASES = [(stage, "data=2") for stage in range(4)] + [(2, "tensor=2"), (3, "tensor=2"), (2, "context=2")]


@pytest.mark.parametrize(("stage", "layout"), CASES)
def test_a_step_of_several_workers_is_that_of_the_oracle(stage, layout, tmp_path, conformance_models):
    section = {"zero_optimization": {"stage": stage}}
    suite = type("Steps", (PolicyWorkerSuite,), {"backend": "deepspeed", "section": section})
    manager = create_manager()
    record = manager.select("policy_worker", "deepspeed").record
    bench = suite.open_bench(
        record, Layout.parse(layout), manager=manager, device="cpu", folder=tmp_path, models=conformance_models
    )
    bench.contract = 3
    try:
        bench.first_step(bench.batch(), f"stage {stage}, {layout}", batching={"mode": "packed"})
    finally:
        bench.close()
