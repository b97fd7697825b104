"""The conformance suite: what a part must do to be chosen by a word in the configuration, and a way to prove it.

In a backend's own repository, with `pip install "rlframework-core[conformance]"`:

    from rlframework.conformance import PolicyWorkerSuite

    class TestPolicyWorker(PolicyWorkerSuite):
        backend = "dtensor"

or, without a file, `rlframework conformance dtensor`. The map: `contracts` is the table of contents, `suites/` what a
part must do, one test a sentence; `oracle` computes the right numbers and shares no code with the framework; `mutants/`
are broken parts that the suites must catch; `rules` seals the suites, `plugin` is the pytest plugin, `report` the
verdicts. Importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlframework.conformance.rules import Suite
    from rlframework.conformance.suites.data_processor import DataProcessorSuite
    from rlframework.conformance.suites.environment import EnvironmentSuite
    from rlframework.conformance.suites.generation import GenerationEngineSuite
    from rlframework.conformance.suites.policy_worker import PolicyWorkerSuite
    from rlframework.conformance.suites.worker_group import WorkerGroupSuite

__all__ = [
    "DataProcessorSuite",
    "EnvironmentSuite",
    "GenerationEngineSuite",
    "PolicyWorkerSuite",
    "WorkerGroupSuite",
]

SUITES = {
    "policy_worker": ("policy_worker", "PolicyWorkerSuite"),
    "data_processor": ("data_processor", "DataProcessorSuite"),
    "worker_group": ("worker_group", "WorkerGroupSuite"),
    "generation_engine": ("generation", "GenerationEngineSuite"),
    "environment": ("environment", "EnvironmentSuite"),
}
"""Kind of part to its suite, as module and class: all kinds that a plugin can bring, algorithms apart."""


def suite_of(kind: str) -> type[Suite]:
    """The suite of a kind of part."""
    suite: type[Suite] = getattr(import_module(__name__), SUITES[kind][1])
    return suite


def __getattr__(name: str) -> Any:
    for module, suite in SUITES.values():
        if name == suite:
            globals()[name] = getattr(import_module(f"{__name__}.suites.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
