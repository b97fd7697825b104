"""What the suite does inside a worker's process: called by `InspectedPolicy.inspect` with the worker."""

from __future__ import annotations

from typing import Any


class Intended(Exception):
    """Raised on purpose."""


def raise_inside_reference(worker: Any) -> str:
    """Raise while the worker holds its reference weights, and catch it outside."""
    try:
        with worker.use_reference_model():
            raise Intended
    except Intended:
        return "seen"


def call(worker: Any, method: str, arguments: dict[str, Any]) -> str:
    """Call a method of the worker itself; the name of the class of what it raised, with its bases, or `nothing`."""
    try:
        getattr(worker, method)(**arguments)
    except Exception as error:  # noqa: BLE001 - told to the suite, which judges it
        return " ".join(kind.__name__ for kind in type(error).__mro__)
    return "nothing"


def held_weights(worker: Any) -> dict[str, Any]:
    """What the engine of a generation worker generates with, by name."""
    return {name: tensor.detach().cpu().clone() for name, tensor in worker.engine._model.state_dict().items()}


def gathered_weights(worker: Any) -> dict[str, Any]:
    """What a policy worker trains, whole, by name."""
    return {name: weight.detach().cpu().clone() for name, weight in worker.gather_weights(worker.weight_specs())}


def attempt_to_broadcast(worker: Any) -> str:
    """Send the weights over the process group of a refit; what went wrong, or nothing."""
    told: str = worker.attempt("broadcast_weights_for_collective", {})[1]
    return told


def draw(worker: Any) -> list[float]:
    """The next numbers of the process's random state."""
    import torch

    return torch.rand(3).tolist()


def reference_bytes(worker: Any) -> int:
    """Bytes of the weights that the worker keeps for its reference, beside its model."""
    kept = getattr(worker, "_reference", None) or {}
    return sum(weight.nbytes for weight in kept.values())
