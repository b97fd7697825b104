"""Access to the internals of an engine: the module, its gradients, the optimizer and the shards of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.policy.head.patch import HeadPatch


def module_of(worker: Any) -> nn.Module:
    """Return the model that the worker trains."""
    return next(value for value in vars(worker).values() if isinstance(value, nn.Module))


def head_of(worker: Any) -> Any:
    """Return the worker's `HeadPatch`; untyped, since mutants change its private attributes."""
    return next(value for value in vars(worker).values() if isinstance(value, HeadPatch))


def optimizer_of(worker: Any) -> torch.optim.Optimizer:
    """Return the worker's optimizer."""
    return next(value for value in vars(worker).values() if isinstance(value, torch.optim.Optimizer))


def gradients_of(worker: Any) -> Iterator[Tensor]:
    """Yield the gradients of the model, or this rank's shards of them."""
    for parameter in module_of(worker).parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            yield gradient.to_local() if hasattr(gradient, "to_local") else gradient


def change_weights(worker: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each shard of the weights by `change(shard)`."""
    worker.restore({name: change(weight) for name, weight in worker.snapshot().items()})


def to_bfloat16(weight: Tensor) -> Tensor:
    """Return `weight` rounded to bfloat16, in its own dtype."""
    return weight.to(torch.bfloat16).to(weight.dtype)
