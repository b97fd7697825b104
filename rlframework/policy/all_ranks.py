"""Run work on every rank so that it either succeeds on all ranks or raises on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rlframework.base.errors import DataError, RLFrameworkError, UserError, WriteError
from rlframework.interfaces.worker_group import WorkerContext

T = TypeVar("T")
_KEPT = (DataError, UserError, WriteError)


def run_on_all_ranks(context: WorkerContext, work: Callable[[], T]) -> list[T]:
    """Run `work` (no collective) on each rank, and return the results of all ranks, by rank. Collective.

    A rank whose work fails raises its own error; the others raise one that names the rank, of type `DataError`,
    `UserError` or `WriteError` if the original error was one, else `RLFrameworkError`.
    """
    if context.world_size == 1:
        return [work()]
    outcome: tuple[Any, str, type[Exception]]
    failure: Exception | None = None
    try:
        outcome = (work(), "", RLFrameworkError)
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failure = error
        raised_as = next((kind for kind in _KEPT if isinstance(error, kind)), RLFrameworkError)
        outcome = (None, f"{type(error).__name__}: {error}", raised_as)
    outcomes: list[Any] = [None] * context.world_size
    torch.distributed.all_gather_object(outcomes, outcome)
    if failure is not None:
        raise failure
    for rank, (_, message, raised_as) in enumerate(outcomes):
        if message:
            raise raised_as(f"rank {rank}: {message}")
    return [value for value, _, _ in outcomes]


@contextmanager
def exhausting(items: Iterator[object]) -> Iterator[None]:
    """Exhaust `items` at the end of the block, even on failure: reading them is a collective."""
    try:
        yield
    finally:
        for _ in items:
            pass
