"""The conformance suite. `pytest --conformance-layout all` runs every layout that the record declares."""

from __future__ import annotations

from rlframework_conformance import PolicyWorkerSuite


class TestPolicyWorker(PolicyWorkerSuite):
    backend = "ddp"
