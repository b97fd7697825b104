"""The conformance suite of training engines, one module per topic; see `rlframework.interfaces.policy_worker`."""

from __future__ import annotations

from rlframework_conformance.suites.policy_worker.adapters import Adapters
from rlframework_conformance.suites.policy_worker.checkpoints import Checkpoints
from rlframework_conformance.suites.policy_worker.conventions import Conventions
from rlframework_conformance.suites.policy_worker.failures import Failures
from rlframework_conformance.suites.policy_worker.grouping import GroupedRows, Grouping
from rlframework_conformance.suites.policy_worker.model_kinds import Experts, Images, Kinds
from rlframework_conformance.suites.policy_worker.reading_state import State
from rlframework_conformance.suites.policy_worker.refit import Refit
from rlframework_conformance.suites.policy_worker.saving import Saving
from rlframework_conformance.suites.policy_worker.scores import Scores
from rlframework_conformance.suites.policy_worker.sharded import Native, Sharded
from rlframework_conformance.suites.policy_worker.token_sets import SampledTokens, TokenSets
from rlframework_conformance.suites.policy_worker.training import MuonOptimizer, Training
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness


class PolicyWorkerSuite(
    Conventions,
    Grouping,
    GroupedRows,
    Kinds,
    Images,
    Training,
    TokenSets,
    SampledTokens,
    MuonOptimizer,
    Experts,
    Scores,
    State,
    Saving,
    Refit,
    Checkpoints,
    Adapters,
    Sharded,
    Native,
    Failures,
    sealed=True,
):
    """Requirements on a backend selected by `policy.backend`. Runs once per layout that the backend declares."""

    kind = "policy_worker"
    harness_class = PolicyHarness
    layouts = True
