"""The backend against its contract with one worker, at the stage that splits weights.

Other stages and layouts are in `make conformance` (tests/conformance/all_parts.py), a step of each in
`test_deepspeed_layouts.py`.
"""

from __future__ import annotations

from rlframework.conformance import PolicyWorkerSuite


class TestStage3(PolicyWorkerSuite):
    backend = "deepspeed"
    section = {"zero_optimization": {"stage": 3}}  # noqa: RUF012
    quick = ("data=1",)
