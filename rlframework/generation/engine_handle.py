"""The driver's handles on engines: in a worker group of their own, or embedded in the workers of a policy.

A handle has one or several lanes: an engine that gets its own requests. All lanes of a handle are called together, and
by one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from rlframework.interfaces.generation_exchange import Incoming, Outgoing
from rlframework.interfaces.named_sharding import REPLICATED_AXES
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup
from rlframework.workers.inline import InlineWorkerGroup


class EngineHandle(ABC):
    """The engines of one worker group."""

    interval: float
    """Seconds that one exchange serves at most, after which new requests can be submitted; longer if `notified`."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        """`name` identifies the engines in messages."""
        self.group, self.name = group, name
        self.lost = False
        """Whether the worker group has failed, so that it can no longer be called."""
        self.loss = ""
        """The first line of what it failed with."""
        self._executor: ThreadPoolExecutor | None = None
        self._exchanging: Future[list[Incoming]] | None = None

    @property
    @abstractmethod
    def lanes(self) -> int:
        """The number of engines that get their own requests."""

    @property
    def in_driver(self) -> bool:
        """Whether the engine runs in the driver's process, where calls return when they are done."""
        return isinstance(self.group, InlineWorkerGroup)

    @property
    def notified(self) -> bool:
        """Whether `notify` ends an exchange early."""
        return False

    def notify(self) -> None:
        """End an exchange in progress soon, if the engine is `notified`: there is something new for it."""
        if self.notified:
            self.group.notify()

    def start(self, method: str, /, **arguments: Any) -> MultiWorkerFuture:
        """Start a call of `method` on all workers, after an exchange in progress."""
        if self._exchanging is not None and not self._exchanging.done():
            self.notify()
            wait([self._exchanging])
        with _Watch(self):
            return self.group.run_all_workers_single_data(method, **arguments)

    def results(self, future: MultiWorkerFuture, deadline: float | None = None) -> list[Any]:
        """Wait for a call, up to `deadline` seconds (None: that of the group), and return its results by rank.

        Raises like `WorkerGroup.get_all_worker_results`; a group in another process is `lost` afterwards.
        """
        future.deadline = deadline
        with _Watch(self):
            return self.group.get_all_worker_results(future)

    def call(self, method: str, /, deadline: float | None = None, **arguments: Any) -> list[Any]:
        """Call `method` on all workers; return the results by rank."""
        return self.results(self.start(method, **arguments), deadline)

    def exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> Future[list[Incoming]]:
        """Exchange requests and results with all lanes, in a thread of this handle.

        An engine in the driver's process serves in the calling thread instead, because modes of torch belong to one.
        """
        if not self.in_driver:
            self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix=self.name)
            self._exchanging = self._executor.submit(self._exchange, outgoing, timeout)
            return self._exchanging
        done: Future[list[Incoming]] = Future()
        try:
            done.set_result(self._exchange(outgoing, timeout))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)
        return done

    def _exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> list[Incoming]:
        with _Watch(self):
            return self.group.get_all_worker_results(self._start_exchange(outgoing, timeout))

    @abstractmethod
    def _start_exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> MultiWorkerFuture:
        """Start `exchange` on the workers, with the entry of `outgoing` that belongs to each lane."""

    def shutdown(self) -> bool:
        """Shut the worker group down; return False if a worker did not exit cleanly."""
        clean = self.group.shutdown(cleanup_method="shutdown")
        self.close()
        return clean and not self.lost

    def close(self) -> None:
        """End the thread of this handle, without waiting for a call in progress."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class RemoteEngine(EngineHandle):
    """One engine in a worker group of its own, hosted by a `GenerationWorker`."""

    interval = 0.1

    @property
    def lanes(self) -> int:
        """One."""
        return 1

    @property
    def notified(self) -> bool:
        """Whether the worker group can notify its workers."""
        return self.group.notifies

    def _start_exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> MultiWorkerFuture:
        (out,) = outgoing
        return self.group.run_all_workers_single_data(
            "exchange", requests=out.requests, abort_ids=out.abort_ids, timeout=timeout
        )


class EmbeddedEngines(EngineHandle):
    """The engines in the workers of a policy; a lane for each data-parallel rank.

    All ranks are called, as gathering the weights of a sharded model is collective, but only the first one of each
    replica gets requests. Longer intervals than those of a `RemoteEngine`, because ranks wait for each other.
    """

    interval = 1.0

    @property
    def lanes(self) -> int:
        """The number of data-parallel ranks."""
        return self.group.sharding.get_axis_size("data_parallel")

    def _start_exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> MultiWorkerFuture:
        sharding = self.group.sharding
        coords = [sharding.get_worker_coords(rank) for rank in range(sharding.size)]
        serving = [all(at[axis] == 0 for axis in REPLICATED_AXES) for at in coords]
        given = [
            outgoing[at["data_parallel"]] if serves else Outgoing() for at, serves in zip(coords, serving, strict=True)
        ]
        future = self.group.run_all_workers_multiple_data(
            "exchange",
            requests=[out.requests for out in given],
            abort_ids=[out.abort_ids for out in given],
            common_kwargs={"timeout": timeout},
        )
        future.return_from_workers = [rank for rank, serves in enumerate(serving) if serves]
        return future


class _Watch:
    """Context that notes on a handle that its worker group has failed."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        failed = kind is not None and issubclass(kind, Exception) and not issubclass(kind, (TypeError, ValueError))
        if failed and not self._handle.in_driver:
            self._handle.lost = True
            self._handle.loss = self._handle.loss or str(error).partition("\n")[0]
