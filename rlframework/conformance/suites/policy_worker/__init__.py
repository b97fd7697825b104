"""The suite of training engines: see `rlframework.interfaces.policy_worker`. One part a contract."""

from __future__ import annotations

from typing import Any

from rlframework.conformance.suites.policy_worker.checkpoints import Checkpoints
from rlframework.conformance.suites.policy_worker.conventions import Conventions
from rlframework.conformance.suites.policy_worker.failures import Failures
from rlframework.conformance.suites.policy_worker.grouping import Grouping
from rlframework.conformance.suites.policy_worker.saving import Saving
from rlframework.conformance.suites.policy_worker.state import State
from rlframework.conformance.suites.policy_worker.training import Training
from rlframework.conformance.suites.policy_worker.workbench import PolicyBench


class PolicyWorkerSuite(Conventions, Grouping, Training, State, Saving, Checkpoints, Failures, sealed=True):
    """What a backend must do to be chosen by `policy.backend`. It runs once a layout that the backend declares."""

    kind = "policy_worker"
    layouts = True

    @classmethod
    def open_bench(cls, record: Any, layout: Any, **settings: Any) -> PolicyBench:
        """See `Suite.open_bench`."""
        return PolicyBench(record, layout, section=cls.section, **settings)
