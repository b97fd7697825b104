"""The backend against its contract, and the contract's tests against mutants of the backend."""

from __future__ import annotations

import pytest

from rlframework_conformance import PolicyWorkerSuite
from rlframework_conformance.mutants.proof import MutantProof

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dtensor suite")]  # its processes serve one test after another


class TestPolicyWorker(PolicyWorkerSuite):
    backend = "dtensor"
    quick = ("data=2",)  # `make conformance` has the other layouts


class TestMutants(MutantProof):
    kind = "policy_worker"
    backend = "dtensor"
