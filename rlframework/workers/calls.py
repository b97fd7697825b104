"""`WorkerCalls`: typed calls of the workers in a group.

A worker group takes the name of a method and its arguments; here the method is given as a function of the workers'
interface, so that a type checker knows the arguments and the result:

    calls = WorkerCalls(group)
    calls.on_all(PolicyWorker.save_pretrained, path="model")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlframework.interfaces.worker_group import WorkerGroup

P = ParamSpec("P")
R = TypeVar("R")
Data = TypeVar("Data")

DATA_PARALLEL = "data_parallel"


class WorkerCalls:
    """Calls of the workers in `group`; arguments are keywords, since workers take no positional ones."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def on_all(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` on all workers with the same arguments; return the results by rank."""
        run: Any = self._group.run_all_workers_single_data
        return self._group.get_all_worker_results(run(method.__name__, *args, **kwargs))

    def on_shards(
        self,
        method: Callable[Concatenate[Any, Data, P], R],
        data: Sequence[Data],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call `method` on all workers, with the argument `data` sharded over the data-parallel ranks.

        `data` has one shard per rank, and so does the result. All other arguments are the same everywhere.
        """
        others = [axis for axis in self._group.sharding.names if axis != DATA_PARALLEL]
        run: Any = self._group.run_all_workers_sharded_data
        future = run(
            method.__name__,
            *args,
            data=data,
            in_sharded_axes=[DATA_PARALLEL],
            replicate_on_axes=others,
            output_is_replicated=others,
            common_kwargs=kwargs,
        )
        return self._group.get_all_worker_results(future)
