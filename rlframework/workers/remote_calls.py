"""Calls from the driver to workers, derived from the interface of the workers in four steps.

1. **The interface** has the method, with its types and its documentation. All ranks get the same arguments, or with
   `@sharded` each data-parallel rank gets its part of the first one:

       class PolicyWorker(ABC):
           @sharded
           def get_logprobs(self, data: Rows, positions: str = "all") -> Rows: ...

2. **The driver's handle** has a line for the method. It returns the results by rank, or what a function makes of them:

       class Policy:
           get_logprobs = remote(PolicyWorker.get_logprobs, joined)

   Called, it names the arguments, because worker groups take keywords, and passes them on to `WorkerCalls`. A method
   that checks more than a line can say is written out, and calls `WorkerCalls` itself, as `Policy.train` does.
3. **The worker group** (`rlframework.workers`, or a plugin) brings the method's name and arguments to each worker, and
   calls the attribute of this name.
4. **The worker** is composed of services. Its attribute is the method of the service that does the work:

       class PolicyWorkerBase(PolicyWorker):
           get_logprobs = of_service("scoring", Scoring.get_logprobs)

So a traceback has the handle, `WorkerCalls`, the worker group and the service, and all have the types of the interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import update_wrapper, wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, overload

from rlframework.interfaces.worker_group import WorkerGroup

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Data = TypeVar("Data")


class WorkerCalls:
    """Calls of the workers in `group`; arguments are keywords, since workers take no positional ones.

    Methods are given as functions of the interface, so that a type checker knows arguments and results:

        WorkerCalls(group).on_all(PolicyWorker.save_pretrained, path="model")
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def on_all(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` on all workers with the same arguments; return the results by rank."""
        run: Any = self._group.run_all_workers_single_data
        return self._group.get_all_worker_results(run(method.__name__, *args, **kwargs))

    def on_shards(
        self, method: Callable[Concatenate[Any, Data, P], R], data: Sequence[Data], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call `method` on all workers, with the argument `data` sharded over the data-parallel ranks.

        `data` has one shard per rank, and so does the result. All other arguments are the same everywhere.
        """
        others = [axis for axis in self._group.sharding.names if axis != "data_parallel"]
        axes = {"in_sharded_axes": ["data_parallel"], "replicate_on_axes": others, "output_is_replicated": others}
        run: Any = self._group.run_all_workers_sharded_data
        future = run(method.__name__, *args, data=data, common_kwargs=kwargs, **axes)
        return self._group.get_all_worker_results(future)


@overload
def remote(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], list[R]]: ...


@overload
def remote(
    method: Callable[Concatenate[Any, P], R], combine: Callable[[list[R]], T]
) -> Callable[Concatenate[Any, P], T]: ...


def remote(method: Callable[..., Any], combine: Callable[[list[Any]], Any] = list) -> Callable[..., Any]:
    """A method of the driver's handle that calls `method` of the workers, and returns `combine(results by rank)`.

    The handle has `_calls`, its `WorkerCalls`. For a sharded method it also has `_split(method, data, options)`, which
    returns the shards, and a function that restores the order of the rows in the combined results.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if not hasattr(method, "sharded"):
            _, *arguments = bound.arguments.items()
            return combine(self._calls.on_all(method, **dict(arguments)))
        bound.apply_defaults()
        _, (_, data), *options = bound.arguments.items()
        shards, restored = self._split(method, data, dict(options))
        return restored(combine(self._calls.on_shards(method, shards, **dict(options))))

    return call


def of_service(service: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of a worker whose attribute `service` does the work in its `method`."""
    return cast("Callable[Concatenate[Any, P], R]", _MethodOfService(service, method))


class _MethodOfService:
    """Reads as the bound method of the service, so that a call of it is a call of the service, without a frame here."""

    def __init__(self, service: str, method: Callable[..., Any]) -> None:
        update_wrapper(self, method)  # type: ignore[arg-type] # its name and docstring, for `help`
        self._read = attrgetter(f"{service}.{method.__name__}")

    def __get__(self, worker: object | None, owner: type | None = None) -> Any:
        return self if worker is None else self._read(worker)
