"""The conformance suites: the requirements on a plugin that a configuration can name, and a way to prove them.

In a backend's own repository, with `pip install "rlframework-core[conformance]"`:

    from rlframework_conformance import PolicyWorkerSuite

    class TestPolicyWorker(PolicyWorkerSuite):
        backend = "dtensor"

or, without a file, `rlframework conformance dtensor`. `contracts` is the table of contents, `suites/` has the
requirements, one test each; `oracle` computes the correct numbers and shares no code with the framework; `mutants/` are
broken implementations that the suites must catch; `rules` seals the suites, `pytest_plugin` adds pytest's options,
`session` runs the suites, `report` builds the verdicts. Importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlframework_conformance.rules import Suite
    from rlframework_conformance.suites.data_processor import DataProcessorSuite
    from rlframework_conformance.suites.environment import EnvironmentSuite
    from rlframework_conformance.suites.generation import GenerationEngineSuite
    from rlframework_conformance.suites.policy_worker import PolicyWorkerSuite
    from rlframework_conformance.suites.worker_group import WorkerGroupSuite

__version__ = "0.2.0"

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
"""Kind of plugin to the module and class of its suite, for all kinds except algorithms."""


def suite_of(kind: str) -> type[Suite]:
    """Return the suite for a kind of plugin."""
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
