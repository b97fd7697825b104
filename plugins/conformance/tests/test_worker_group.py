"""The core's worker groups pass the suite, and the suite catches every mutant."""

from __future__ import annotations

import pytest

from rlframework_conformance import WorkerGroupSuite
from rlframework_conformance.mutants.proof import MutantProof

pytestmark = pytest.mark.slow


class TestInline(WorkerGroupSuite):
    backend = "inline"


class TestProcesses(WorkerGroupSuite):
    backend = "processes"
    quick = ("data=2",)  # `inline` has one worker


@pytest.mark.usefixtures("ray_session")
class TestRay(WorkerGroupSuite):
    backend = "ray"
    quick = ("data=2",)  # `make conformance` has one worker too
    pytestmark = pytest.mark.xdist_group("ray")


class TestMutants(MutantProof):
    kind = "worker_group"
    backend = "processes"
    quick = ("data=2",)  # `inline` has one worker
