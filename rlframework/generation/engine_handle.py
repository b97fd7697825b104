"""The driver's handles on engines: in a worker group of their own, or embedded in the workers of a policy.

A handle has one or several lanes: an engine that gets its own requests. All lanes of a handle are called together, and
by one call at a time. With thousands of engines a thread for each would cost more than the calls, so a `RemoteEngine`
is called back with its results; a thread waits only for a call that fails or takes too long.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from rlframework.base.errors import WorkerError
from rlframework.base.logs import debug_span
from rlframework.interfaces.generation import Incoming, Outgoing
from rlframework.interfaces.named_sharding import REPLICATED_AXES
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup
from rlframework.workers.dispatch import InlineWorkerGroup

_LOG = logging.getLogger(__name__)


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
        self._closed = False
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
            self.watch()
            wait([self._exchanging])
        with self._noting_loss():
            return self.group.run_all_workers_single_data(method, **arguments)

    def results(self, future: MultiWorkerFuture, deadline: float | None = None) -> list[Any]:
        """Wait for a call, up to `deadline` seconds (None: that of the group), and return its results by rank.

        Raises like `WorkerGroup.get_all_worker_results`; a group in another process is `lost` afterwards.
        """
        future.deadline = deadline
        with self._noting_loss():
            return self.group.get_all_worker_results(future)

    def call(self, method: str, /, deadline: float | None = None, **arguments: Any) -> list[Any]:
        """Call `method` on all workers; return the results by rank."""
        return self.results(self.start(method, **arguments), deadline)

    def exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> Future[list[Incoming]]:
        """Exchange requests and results with all lanes, in a thread of this handle.

        An engine in the driver's process serves in the calling thread instead, because modes of torch belong to one.
        """
        if not self.in_driver:
            self._exchanging = self._in_thread(partial(self._exchange, outgoing, timeout))
            return self._exchanging
        done: Future[list[Incoming]] = Future()
        try:
            done.set_result(self._exchange(outgoing, timeout))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)
        return done

    def watch(self) -> None:
        """Watch an exchange in progress that takes too long, so that it ends by its deadline at the latest."""

    def wait_if_shared(self) -> None:
        """Wait for an exchange in progress if others call the same workers, and do not know of it."""

    def _exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> list[Incoming]:
        with self._noting_loss():
            call = self._start_exchange(outgoing, timeout)
        return self.results(call)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Context of a call, whose failure ends a worker group outside the driver's process."""
        try:
            yield
        except (TypeError, ValueError):  # an argument that cannot be sent
            raise
        except Exception as error:
            if not self.in_driver:
                self.lost = True
                self.loss = self.loss or str(error).partition("\n")[0]
            raise

    def _in_thread(self, call: Callable[[], list[Incoming]]) -> Future[list[Incoming]]:
        """Run `call` in the thread of this handle."""
        if self._closed:
            failed: Future[list[Incoming]] = Future()
            failed.set_exception(WorkerError(f"{self.name} was shut down"))
            return failed
        if self._executor is None:
            _LOG.debug("%s: starting the thread of its %d lanes", self.name, self.lanes)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        return self._executor.submit(call)

    @abstractmethod
    def _start_exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> MultiWorkerFuture:
        """Start `exchange` on the workers, with the entry of `outgoing` that belongs to each lane."""

    def shutdown(self) -> bool:
        """Shut the worker group down; return False if a worker did not exit cleanly."""
        with debug_span(_LOG, "%s: shutting down", self.name):
            clean = self.group.shutdown(cleanup_method="shutdown")
        self.close()
        return clean and not self.lost

    def close(self) -> None:
        """End the thread of this handle, without waiting for a call in progress."""
        self._closed = True
        if self._executor is not None:
            _LOG.debug("%s: ending its thread", self.name)
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

    def exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> Future[list[Incoming]]:
        """See `EngineHandle.exchange`; without a thread, if the worker group calls back."""
        if self.in_driver:
            return super().exchange(outgoing, timeout)
        with self._noting_loss():
            call = self._start_exchange(outgoing, timeout)
        exchange = self._exchanging = _Exchange(partial(self._in_thread, partial(self.results, call)))
        if not self.group.when_done(call, exchange.arrived):
            exchange.wait()
        return exchange

    def watch(self) -> None:
        """See `EngineHandle.watch`."""
        if isinstance(self._exchanging, _Exchange) and not self._exchanging.done():
            self._exchanging.wait()

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

    def wait_if_shared(self) -> None:
        """See `EngineHandle.wait_if_shared`: the trainer's next call goes to the same workers."""
        if self._exchanging is not None:
            wait([self._exchanging])

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


class _Exchange(Future[list[Incoming]]):
    """An exchange in progress; its results come from a callback, or from a thread that waits for them."""

    def __init__(self, results: Callable[[], Future[list[Incoming]]]) -> None:
        """`results()` waits for the results in a thread; may be called more than once."""
        super().__init__()
        self._results = results

    def arrived(self, results: list[Incoming] | None) -> None:
        """Take the results; None if the call has failed, which the group says only to those that wait for it."""
        if results is None:
            self.wait()
        else:
            self._settle(results)

    def wait(self) -> None:
        """Wait for the results in a thread."""
        self._results().add_done_callback(self._take)

    def _take(self, done: Future[list[Incoming]]) -> None:
        error = done.exception()
        self._settle(done.result() if error is None else error)

    def _settle(self, outcome: list[Incoming] | BaseException) -> None:
        with suppress(InvalidStateError):  # a callback and a thread may both bring it
            if isinstance(outcome, BaseException):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
