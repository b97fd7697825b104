"""The backend against its contract with one worker, where it is quick.

The other layouts, and the distributed optimizer, are in `make conformance` (plugins/conformance/tests/all_parts.py).
"""

from __future__ import annotations

import pytest

from rlframework_conformance import PolicyWorkerSuite

pytestmark = pytest.mark.slow


class TestPolicyWorker(PolicyWorkerSuite):
    backend = "megatron"
    quick = ("data=1",)
