"""The backend against its contract: one worker that splits gradients, and two that split weights too.

The other stages, and the other layouts of each, are in `make conformance` (tests/conformance/all_parts.py).
"""

from __future__ import annotations

from rlframework.conformance import PolicyWorkerSuite


class TestStage2(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 2}}  # noqa: RUF012
    quick = ("data=1",)


class TestStage3(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 3}}  # noqa: RUF012
    quick = ("data=2",)
