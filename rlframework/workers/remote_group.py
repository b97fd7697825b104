"""`RemoteWorkerGroup`: the base class of worker groups whose workers run in other processes.

It starts `WorkerHost`s, waits for their results, handles failures and deadlines, and ends the processes. A subclass
implements how a process is started, called and ended; a *ref* is its handle of a pending result.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util  # noqa: F401 - its exit handler waits for children; ours, registered later, runs first
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from rlframework.config.sections import RemoteGroupConfig
from rlframework.errors import ConfigError, DeadlineExceeded, WorkerError
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec
from rlframework.workers import dispatch, machine
from rlframework.workers.dispatch import DispatchingWorkerGroup
from rlframework.workers.failures import HostFailure, as_exception

if TYPE_CHECKING:
    from rlframework.config.sections import WorkerGroupConfig
    from rlframework.interfaces.named_sharding import NamedSharding

_LOG = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds to wait for further failures after the first one, so that the root cause is reported, not its consequence."""
_KILL_WAIT = 5.0
_LIVE: weakref.WeakSet[RemoteWorkerGroup] = weakref.WeakSet()


@dataclass
class Call(MultiWorkerFuture):
    """A future that records the name of the called method, for messages."""

    method_name: str = "a call"


class RemoteWorkerGroup(DispatchingWorkerGroup):
    """One process per rank of `sharding`, each with a `WorkerHost`."""

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        check_ranks(sharding, sharding.size)
        super().__init__(sharding)
        self._config = config if isinstance(config, RemoteGroupConfig) else RemoteGroupConfig(**config.model_dump())
        self._deadlines = config.deadlines
        self._ended: str | None = None
        self._gone: bool | None = None
        self._driver = os.getpid()
        self._pids: dict[int, int] = {}
        self._remote_pids: dict[int, int] = {}
        self._prepare(spec, device)
        _LIVE.add(self)
        self._started = time.monotonic()
        try:
            self._start(spec, device)
        except BaseException:
            self._end("its workers failed to start")
            raise

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        """Reject what this machine cannot run, before any process is started."""

    @abstractmethod
    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        """Start a process with a `WorkerHost` for each rank."""

    @abstractmethod
    def _send(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method of the `WorkerHost` of `rank`; return a ref. `TypeError` if an argument cannot be sent."""

    @abstractmethod
    def _wait_any(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        """Wait until any of `refs` has a result, and return those that have; empty after `timeout` seconds."""

    @abstractmethod
    def _result(self, rank: int, ref: Any) -> Any:
        """The result of `ref`, or a `HostFailure` if the process died."""

    @abstractmethod
    def _end_hosts(self) -> None:
        """Kill the processes."""

    def _send_all(self, method: str, calls: Sequence[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        """Call a method of several hosts, given as (rank, arguments); return refs. Ends the group if one call fails."""
        refs: list[Any] = []
        try:
            for rank, args in calls:
                refs.append(self._send(rank, method, *args))
        except BaseException:
            if refs:
                self._end(f"{method} could not be sent to all workers")
            raise
        return refs

    def _on_ended(self) -> None:
        """Called when the processes are gone."""

    def _shared(self, value: Any) -> Any:
        """`value`, which is sent to several ranks, in a form that is stored once."""
        return value

    def _threads(self, rank: int) -> int | None:
        """Number of threads of a worker."""
        return None

    def _address(self) -> str:
        """The address of rank 0's machine at which it listens for the other workers."""
        return "127.0.0.1"

    def _context(self, rank: int, context: WorkerContext) -> WorkerContext:
        """`context`, which is the same for all workers, completed for one."""
        return replace(context, rank=rank, local_rank=rank, threads=self._threads(rank))

    def _exception(self, failures: Mapping[int, HostFailure], doing: str) -> Exception:
        """The exception to raise for the failures of a call."""
        return as_exception(failures, self._sharding.size, doing, self._location_text)

    def _location_text(self, rank: int) -> str:
        """The location as a phrase to append to the rank in messages; empty if there is nothing to say."""
        return ""

    def _describe_resources(self) -> str:
        """The requested and existing resources, for messages; empty if there is nothing to say."""
        return ""

    def _wait_for_other_machines(self, ranks: Sequence[int]) -> bool:
        """Wait briefly until the processes on other machines have ended; return whether they have."""
        return True

    # -- common to all groups -----------------------------------------------------------------------------------------

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Wait at most `deadlines.call` seconds for the results; the first failure ends the group."""
        self._require_usable("waiting for results")
        called = range(len(future.futures)) if future.called_workers is None else future.called_workers
        refs = dict(zip(called, future.futures, strict=True))
        doing = future.method_name if isinstance(future, Call) else "a call"
        if future.deadline is None:
            results = self._wait(refs, doing, "call", self._deadlines.call)
        else:
            results = self._wait(refs, doing, "", future.deadline)
        return dispatch.select_results(future, list(results.values()))

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """See `WorkerGroup.shutdown`."""
        clean = self._clean_up(cleanup_method, timeout)
        return self._end("it was shut down") and clean

    def _clean_up(self, cleanup_method: str | None, timeout: float | None) -> bool:
        """Call `cleanup_method` on all workers if there is one; return False if the call failed."""
        if self._ended is not None or cleanup_method is None:
            return True
        ranks = list(range(self._sharding.size))
        refs = dict(enumerate(self._run(cleanup_method, dispatch.Dispatch(ranks, [{}] * len(ranks), ranks)).futures))
        try:
            self._wait(refs, cleanup_method, "shutdown", self._deadlines.shutdown if timeout is None else timeout)
        except Exception:  # noqa: BLE001 - logged with its traceback; the shutdown must continue
            _LOG.exception("%s failed during the shutdown of the workers", cleanup_method)
            return False
        return True

    def _start(self, spec: WorkerSpec, device: str) -> None:
        self._start_hosts(spec, device)
        contexts, shared = self._contexts(device), self._shared(spec)
        started = {rank: self._send(rank, "start", shared, context) for rank, context in enumerate(contexts)}
        self._wait_for_start(started, f"constructing {spec.target}")

    def _contexts(self, device: str) -> list[WorkerContext]:
        """Wait until all processes are up; return the context of each rank, with a port that rank 0 has reserved."""
        ranks = range(self._sharding.size)
        pids = self._wait_for_start({rank: self._send(rank, "pid") for rank in ranks}, "starting its process")
        self._record_pids(pids)
        reserved = {0: self._send(0, "reserve_address", self._address())}
        address, port = self._wait_for_start(reserved, "reserving a port")[0]
        context = WorkerContext(
            world_size=self._sharding.size,
            master_addr=address,
            master_port=port,
            device=device,
            deadline=self._deadlines.call,
        )
        return [self._context(rank, context) for rank in ranks]

    def _wait_for_start(self, refs: dict[int, Any], doing: str) -> dict[int, Any]:
        return self._wait(refs, doing, "start", self._deadlines.start, self._started)

    def _record_pids(self, replies: Mapping[int, tuple[int, str]]) -> None:
        """Store the process ids, given as `WorkerHost.pid` returns them."""
        for rank, (pid, identity) in replies.items():
            (self._pids if identity == machine.identity() else self._remote_pids)[rank] = pid

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        self._require_usable(method_name)
        shared = self._store_shared(plan.kwargs)
        calls = [
            (
                worker,
                (
                    method_name,
                    worker in plan.returned,
                    tuple(kwargs),
                    *[shared.get(id(value), value) for value in kwargs.values()],
                ),
            )
            for worker, kwargs in zip(plan.called, plan.kwargs, strict=True)
        ]
        refs = self._send_all("call", calls)
        return Call(refs, return_from_workers=plan.returned, called_workers=plan.called, method_name=method_name)

    def _store_shared(self, arguments: Sequence[Mapping[Any, Any]]) -> dict[int, Any]:
        """Store each value that several workers get once, by `id`; small values are sent with each call instead."""
        counts: dict[int, int] = {}
        values: dict[int, Any] = {}
        for of_worker in arguments:
            for value in of_worker.values():
                counts[id(value)] = counts.get(id(value), 0) + 1
                values[id(value)] = value
        small = (type(None), bool, int, float, str)
        return {
            key: self._shared(value)
            for key, value in values.items()
            if counts[key] > 1 and not isinstance(value, small)
        }

    def _require_usable(self, doing: str) -> None:
        if self._ended is not None:
            raise WorkerError(f"{doing}: the worker group is no longer usable: {self._ended}; create a new one")

    def _wait(
        self, refs: dict[int, Any], doing: str, deadline: str, seconds: float, started: float | None = None
    ) -> dict[int, Any]:
        """The results by rank. A failure, a missed deadline or an interrupt ends the group and is raised."""
        try:
            return self._collect(refs, doing, deadline, seconds, time.monotonic() if started is None else started)
        except BaseException as error:
            self._end(f"{doing} ended with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            raise

    def _collect(
        self, refs: dict[int, Any], doing: str, deadline: str, seconds: float, started: float
    ) -> dict[int, Any]:
        pending = {ref: rank for rank, ref in refs.items()}
        results: dict[int, Any] = {}
        failures: dict[int, HostFailure] = {}
        until = started + seconds
        while pending:
            ready = self._wait_any(list(pending), max(until - time.monotonic(), 0.0))
            if not ready:
                break
            for ref in ready:
                rank = pending.pop(ref)
                results[rank] = self._result(rank, ref)
                if isinstance(results[rank], HostFailure):
                    failures[rank] = results[rank]
                    until = min(until, time.monotonic() + _GRACE)
        if failures:
            raise self._exception(failures, doing)
        if pending:
            self._raise_deadline(sorted(pending.values()), sorted(results), doing, deadline, seconds)
        return {rank: results[rank] for rank in refs}

    def _raise_deadline(
        self, missing: list[int], answered: list[int], doing: str, deadline: str, seconds: float
    ) -> NoReturn:
        size = self._sharding.size
        nodes = {self._location_text(rank) for rank in missing} - {""}
        raise DeadlineExceeded(
            f"{doing}: no answer within {seconds:g} s from rank {', '.join(map(str, missing))} of {size}"
            f"{','.join(sorted(nodes))}; answered: {', '.join(map(str, answered)) or 'none'}. The workers were ended. "
            + (self._describe_resources() if deadline == "start" else "")
            + (f"If they just need more time, raise worker_group.deadlines.{deadline}" if deadline else "")
        )

    def _end(self, reason: str) -> bool:
        """Kill the processes and wait until they are gone; idempotent."""
        self._ended = self._ended or reason
        if self._gone is None:  # still None if this was interrupted: tried again when the program exits
            self._end_hosts()
            gone = _wait_until_gone(self._pids.values()) and self._wait_for_other_machines(sorted(self._remote_pids))
            self._on_ended()
            _LIVE.discard(self)
            self._gone = gone
        return self._gone


class GroupArgumentError(ConfigError, ValueError):
    """An invalid argument of a worker group."""


def check_ranks(sharding: NamedSharding, workers: int) -> None:
    """Raise an error unless `sharding` holds the ranks of `workers` workers once each."""
    if sorted(sharding.layout.ravel().tolist()) != list(range(workers)):
        raise GroupArgumentError(f"the sharding must hold the ranks 0..{workers - 1} once each, got {sharding}")


def _wait_until_gone(pids: Iterable[int]) -> bool:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, left = psutil.wait_procs(processes, _KILL_WAIT)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return not left


def _end_all() -> None:
    for group in list(_LIVE):
        if group._driver == os.getpid():  # processes forked from the driver must not end its workers
            group._end("the program ended")


atexit.register(_end_all)
