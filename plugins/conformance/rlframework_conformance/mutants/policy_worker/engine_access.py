"""Breaking the engine or a service of a policy worker, and access to an engine's module, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlframework.plugins.types import Capability
from rlframework.policy.head.patch import HeadPatch
from rlframework_conformance.measure import MutantNotApplicable

T = TypeVar("T")
STATE = frozenset({Capability.PORTABLE_OPTIMIZER_STATE})
"""Capabilities that the engine must declare for a mutant that loads whole weights or moments."""


def in_service(attribute: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Decorate `break_service(service_class)`: break the class that the worker names as `attribute`."""

    def decorate(break_service: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def break_it(worker_class: Any) -> Any:
            return type("Broken", (worker_class,), {attribute: break_service(getattr(worker_class, attribute))})

        return break_it

    return decorate


in_engine = in_service("engine_class")
"""Decorate `break_engine(engine_class)`, which returns a broken `Engine`."""


def module_of(engine: Any) -> nn.Module:
    """Return the model that the engine trains: its attribute `model`, or the first that is a module."""
    model = getattr(engine, "model", None)
    return model if isinstance(model, nn.Module) else _attribute(engine, nn.Module)


def head_of(engine: Any) -> Any:
    """Return the engine's `HeadPatch`; untyped, since mutants replace its methods."""
    return _attribute(engine, HeadPatch)


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """Return the engine's optimizer."""
    return _attribute(engine, torch.optim.Optimizer)


def _attribute(engine: Any, kind: type[T]) -> T:
    """Return the first attribute of the engine that is a `kind`; raise `MutantNotApplicable` if it has none."""
    for value in vars(engine).values():
        if isinstance(value, kind):
            return value
    raise MutantNotApplicable(
        f"it changes the {kind.__name__} among the attributes of the engine, and there is none: it says nothing about "
        "this backend"
    )


def gradients_of(engine: Any) -> Iterator[Tensor]:
    """Yield the gradients of the model, or this rank's shards of them.

    Raises `MutantNotApplicable` if no parameter has one: the backend keeps them elsewhere.
    """
    found = [parameter.grad for parameter in module_of(engine).parameters() if parameter.grad is not None]
    if not found:
        raise MutantNotApplicable("it changes `parameter.grad`, and this backend keeps gradients elsewhere")
    for gradient in found:
        yield gradient.to_local() if hasattr(gradient, "to_local") else gradient


def change_weights(engine: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each shard of the weights by `change(shard)`."""
    engine.restore({name: change(weight) for name, weight in engine.snapshot().items()})


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return copies of all weights, whole. Collective."""
    return {name: weight.clone() for name, weight in engine.gather_weights(engine.weight_specs())}


def changed_updates(change: Callable[[str, Tensor, Tensor], Tensor]) -> Callable[[Any], Any]:
    """Break steps: each weight becomes `change(name, before, after)`, wherever the engine keeps gradients.

    Where the epsilon of AdamW is far above the gradient, the update is in proportion to the gradient, so a part of the
    update is that of a part of the gradient. Needs `STATE`.
    """

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                before = whole_weights(self)
                done = super().clip_and_step(max_grad_norm, lr)
                after = whole_weights(self)
                self.load_weights({name: change(name, before[name], weight) for name, weight in after.items()})
                return done

        return Broken

    return break_it


def to_bfloat16(weight: Tensor) -> Tensor:
    """Return `weight` rounded to bfloat16, in its own dtype."""
    return weight.to(torch.bfloat16).to(weight.dtype)
