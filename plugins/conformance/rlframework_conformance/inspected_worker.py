"""Workers that the suites can inspect inside their own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlframework.generation.worker import GenerationWorker
from rlframework.plugins.discovery import load_target


class InspectedReceiver(GenerationWorker):
    """A generation worker that the suites can inspect."""

    def inspect(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """Call `module:function` with the worker."""
        return load_target(function)(self, **arguments)


class Inspected:
    """Wraps a worker and forwards attribute access.

    `inner` is the import path of its class; `mutant` breaks it first.
    """

    def __init__(self, *, inner: str, mutant: str | None = None, **kwargs: Any) -> None:
        worker_class = load_target(inner)
        if mutant is not None:
            from rlframework_conformance.mutants import find_mutant

            worker_class = find_mutant("policy_worker", mutant).break_it(worker_class)
        self.worker = worker_class(**kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "worker":  # the constructor failed before setting it
            raise AttributeError(name)
        return getattr(self.worker, name)

    def inspect(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """Call `module:function` with the worker."""
        return load_target(function)(self.worker, **arguments)
