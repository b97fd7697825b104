"""What all workers of a policy find out together: each does its part, and where one fails, all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.errors import RLFrameworkError, UserError

if TYPE_CHECKING:
    from rlframework.interfaces.worker_group import WorkerContext

T = TypeVar("T")


def together(context: WorkerContext, work: Callable[[], T]) -> list[T]:
    """What `work` gives on each rank, by rank. Collective, and `work` is not: each rank comes to its end or fails.

    A rank whose own work failed raises that error; the others raise one that names the rank, a `UserError` where it
    was one.
    """
    if context.world_size == 1:
        return [work()]
    import torch

    own: tuple[Any, str, bool] = (None, "", False)
    failure: Exception | None = None
    try:
        own = (work(), "", False)
    except Exception as error:  # noqa: BLE001 - raised below, after the others know
        failure = error
        own = (None, f"{type(error).__name__}: {error}", isinstance(error, UserError))
    found: list[Any] = [None] * context.world_size
    torch.distributed.all_gather_object(found, own)
    if failure is not None:
        raise failure
    for rank, (_, told, mistake) in enumerate(found):
        if told:
            raise (UserError if mistake else RLFrameworkError)(f"rank {rank}: {told}")
    return [value for value, _, _ in found]
