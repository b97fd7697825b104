"""What all workers of a policy find out together: each does its part, and where one fails, all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.errors import DataError, RLFrameworkError, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from rlframework.interfaces.worker_group import WorkerContext

T = TypeVar("T")


def together(context: WorkerContext, work: Callable[[], T]) -> list[T]:
    """What `work` gives on each rank, by rank. Collective, and `work` is not: each rank comes to its end or fails.

    A rank whose own work failed raises that error; the others raise one that names the rank, a `UserError` or
    `DataError` where it was one.
    """
    if context.world_size == 1:
        return [work()]
    import torch

    own: tuple[Any, str, type[Exception]] = (None, "", RLFrameworkError)
    failure: Exception | None = None
    try:
        own = (work(), "", RLFrameworkError)
    except Exception as error:  # noqa: BLE001 - raised below, after the others know
        failure = error
        told_as = next((kind for kind in (DataError, UserError) if isinstance(error, kind)), RLFrameworkError)
        own = (None, f"{type(error).__name__}: {error}", told_as)
    found: list[Any] = [None] * context.world_size
    torch.distributed.all_gather_object(found, own)
    if failure is not None:
        raise failure
    for rank, (_, told, told_as) in enumerate(found):
        if told:
            raise told_as(f"rank {rank}: {told}")
    return [value for value, _, _ in found]


def require_shared(folder: Path, context: WorkerContext, form: str) -> None:
    """A `UserError` where this rank does not see the `folder` that rank 0 made for a checkpoint of `form`."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} was made by rank 0 and is not there for rank {context.rank}: {form} checkpoints need a file "
            "system that all workers share; set checkpoints.format=portable, or another output_dir"
        )
