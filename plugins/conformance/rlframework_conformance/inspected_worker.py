"""Workers that the suites can inspect inside their own process, and the functions that inspect them there."""

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


class Intended(Exception):
    """Raised on purpose."""


def raise_inside_reference(worker: Any) -> str:
    """Raise while the worker holds its reference weights, and catch the exception outside."""
    try:
        with worker.use_reference_model():
            raise Intended
    except Intended:
        return "seen"


def call(worker: Any, method: str, arguments: dict[str, Any]) -> str:
    """Call a method of the worker; return the class names of its exception and bases, or `nothing`.

    A `NotImplementedError` of an engine that is not finished yet is raised.
    """
    try:
        getattr(worker, method)(**arguments)
    except Exception as error:
        if type(error) is NotImplementedError:
            raise
        return " ".join(kind.__name__ for kind in type(error).__mro__)
    return "nothing"


def held_weights(worker: Any) -> dict[str, Any]:
    """Return the weights that a generation worker's engine generates with, by name."""
    return {name: tensor.detach().cpu().clone() for name, tensor in worker.engine._model.state_dict().items()}


def gathered_weights(worker: Any) -> dict[str, Any]:
    """Return the full weights that a policy worker trains, by name."""
    engine = worker.engine
    return {name: weight.detach().cpu().clone() for name, weight in engine.gather_weights(engine.weight_specs())}


def attempt_to_broadcast(worker: Any) -> str:
    """Send the weights over a refit's process group; return the error message, or an empty string."""
    error: str = worker.attempt("broadcast_weights_for_collective", {})[1]
    return error


def draw(worker: Any) -> list[float]:
    """Return the next numbers from the process's random state."""
    import torch

    return torch.rand(3).tolist()


def reference_bytes(worker: Any) -> int:
    """Return the bytes of reference weights that the worker keeps in addition to its model."""
    kept: dict[str, Any] = getattr(worker.scoring.reference, "weights", {})
    return sum(weight.nbytes for weight in kept.values())
