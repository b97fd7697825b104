"""The backend against its contract, and the contract's tests against broken forms of the backend."""

from __future__ import annotations

from rlframework.conformance import PolicyWorkerSuite
from rlframework.conformance.mutants.proof import MutantProof


class TestPolicyWorker(PolicyWorkerSuite):
    backend = "dtensor"


class TestMutants(MutantProof):
    kind = "policy_worker"
    backend = "dtensor"
