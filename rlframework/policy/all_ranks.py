"""Run work on every rank so that it either succeeds on all ranks or raises on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.errors import DataError, RLFrameworkError, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from rlframework.interfaces.worker_group import WorkerContext

T = TypeVar("T")


def run_on_all_ranks(context: WorkerContext, work: Callable[[], T]) -> list[T]:
    """Run `work` on each rank and return the results of all ranks, by rank. Collective, although `work` is not.

    A rank whose work fails raises its own error; the others raise one that names the rank, of type `UserError` or
    `DataError` if the original error was one, else `RLFrameworkError`.
    """
    if context.world_size == 1:
        return [work()]
    import torch

    outcome: tuple[Any, str, type[Exception]]
    failure: Exception | None = None
    try:
        outcome = (work(), "", RLFrameworkError)
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failure = error
        raised_as = next((kind for kind in (DataError, UserError) if isinstance(error, kind)), RLFrameworkError)
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


def require_shared_folder(folder: Path, context: WorkerContext, form: str) -> None:
    """Raise a `UserError` if this rank does not see the `folder` that rank 0 created for a checkpoint."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} was created by rank 0, but rank {context.rank} does not see it: {form} checkpoints need a file "
            "system that all workers share; set checkpoints.format=portable, or another output_dir"
        )
