"""`RemoteWorkerGroup`: the base class of worker groups whose workers run in other processes, and their `WorkerHost`.

The group starts a `WorkerHost` in each process, waits for results, handles failures and deadlines, and ends the
processes. A subclass implements how a process is started, called and ended; a *ref* is its handle of a pending result.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing.util  # noqa: F401 - its exit handler waits for children; ours, registered later, runs first
import os
import time
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil

from rlframework.base.errors import ConfigError, DeadlineExceeded, WorkerError, WorkerLost
from rlframework.base.logs import debug_span, log_to_stderr
from rlframework.config.sections import RemoteGroupConfig, WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec, never
from rlframework.plugins.discovery import load_target
from rlframework.workers import dispatch, machine
from rlframework.workers.failures import MOST_LISTED, HostFailure, as_exception, list_ranks
from rlframework.workers.temporary import TemporaryFolder

_LOG = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds to wait for further failures after the first one, so that the root cause is reported, not its consequence."""
KILL_WAIT = 5.0
"""Seconds to wait until killed processes are gone."""
_LONGEST_WAIT = 1e8
"""In seconds; what waits for results accepts no infinity."""
SMALL = (type(None), bool, int, float, str)
"""Values that are sent with each call instead of being stored once."""
_LIVE: weakref.WeakSet[RemoteWorkerGroup] = weakref.WeakSet()


class RemoteWorkerGroup(dispatch.DispatchingWorkerGroup):
    """One process per rank of `sharding`, each with a `WorkerHost`. Processes on this machine share a TMPDIR."""

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        check_ranks(sharding, sharding.size)
        super().__init__(sharding)
        self._config = config if isinstance(config, RemoteGroupConfig) else RemoteGroupConfig(**config.model_dump())
        self._deadlines = config.deadlines
        self._ended: str | None = None
        self._refusal: type[WorkerError] = WorkerError  # of calls after the end: of a lost worker, the loss
        self._gone: bool | None = None
        self._driver = os.getpid()
        self._pids: dict[int, tuple[int, str]] = {}
        self._temporary = self._temporary_folder(self._config.environment.get("TMPDIR"))
        self.notifies = spec.notified
        _LIVE.add(self)
        self._started = time.monotonic()
        try:
            self._start(spec, device)
        except BaseException:
            self._end("its workers failed to start")
            raise

    def _temporary_folder(self, parent: str | None) -> TemporaryFolder:
        """Return the folder for temporary files, which is removed once the processes have ended."""
        return TemporaryFolder(parent)

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, spec: WorkerSpec, device: str) -> None:
        """Start a process with a `WorkerHost` for each rank, and construct the workers.

        Rejects what this machine cannot run before any process is started.
        """

    @abstractmethod
    def _call(self, rank: int, method: str, *args: Any) -> Callable[[], Any]:
        """A function that calls a method of the `WorkerHost` of `rank` and returns a ref.

        Raises `TypeError` if an argument cannot be sent.
        """

    @abstractmethod
    def _notify(self) -> None:
        """Notify all workers, which may be ending meanwhile in another thread."""

    @abstractmethod
    def _wait_any(self, refs: Mapping[Any, int], timeout: float) -> list[Any]:
        """Wait until any of `refs`, given with their ranks, has a result, and return those that have.

        Empty after `timeout` seconds.
        """

    @abstractmethod
    def _result(self, rank: int, ref: Any) -> Any:
        """The result of `ref`, or a `HostFailure` if the process died."""

    @abstractmethod
    def _when_done(self, rank: int, ref: Any, callback: Callable[[Any], None]) -> None:
        """Call `callback`, in any thread, with the result of `ref` or a `HostFailure`."""

    @abstractmethod
    def _end_hosts(self) -> bool:
        """Kill the processes; wait briefly until those on other machines have ended, and return whether they have."""

    @abstractmethod
    def _shared(self, value: Any) -> Any:
        """`value`, which is sent to several ranks, in a form that is stored once."""

    @abstractmethod
    def _environment(self, rank: int) -> dict[str, str]:
        """The environment variables of a worker."""

    def _address(self) -> str:
        """The address of rank 0's machine at which it listens for the other workers."""
        return "127.0.0.1"

    def _context(self, rank: int, context: WorkerContext) -> WorkerContext:
        """`context`, which is the same for all workers, completed for one."""
        return replace(context, rank=rank, local_rank=rank, threads=machine.threads_of(self._environment(rank)))

    def _exception(self, failures: Mapping[int, HostFailure], doing: str) -> Exception:
        """The exception to raise for the failures of a call."""
        return as_exception(failures, self._sharding.size, doing, self._location_text)

    def _location_text(self, rank: int) -> str:
        """The location as a phrase to append to the rank in messages; empty if there is nothing to say."""
        return ""

    def _describe_resources(self) -> str:
        """The requested and existing resources, for messages; empty if there is nothing to say."""
        return ""

    def _on_ended(self) -> None:
        """Called when the processes are gone."""

    # -- common to all groups -----------------------------------------------------------------------------------------

    @property
    def ended(self) -> str | None:
        """See `WorkerGroup.ended`."""
        return self._ended

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Wait at most `deadlines.call` seconds for the results; the first failure ends the group."""
        self._require_usable("waiting for results")
        called = range(len(future.futures)) if future.called_workers is None else future.called_workers
        refs = dict(zip(called, future.futures, strict=True))
        results = self._wait(refs, future.method_name, "call", future.deadline)
        return dispatch.select_results(future, list(results.values()))

    def when_done(self, future: MultiWorkerFuture, callback: Callable[[list[Any] | None], None]) -> bool:
        """See `WorkerGroup.when_done`; only for calls of one worker."""
        called = range(len(future.futures)) if future.called_workers is None else future.called_workers
        if len(called) != 1 or self._ended is not None:
            return False

        def arrived(result: Any) -> None:
            callback(None if isinstance(result, HostFailure) else dispatch.select_results(future, [result]))

        self._when_done(called[0], future.futures[0], arrived)
        return True

    def notify(self) -> None:
        """See `WorkerGroup.notify`."""
        if self.notifies and self._ended is None:
            self._notify()

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """See `WorkerGroup.shutdown`."""
        clean = self._clean_up(cleanup_method, timeout)
        return self._end("it was shut down") and clean

    def _clean_up(self, cleanup_method: str | None, timeout: float | None) -> bool:
        """Call `cleanup_method` on all workers if there is one; return False if the call failed."""
        if self._ended is not None or cleanup_method is None:
            return True
        ranks = list(range(self._sharding.size))
        try:
            refs = self._run(cleanup_method, dispatch.Dispatch(ranks, [{}] * len(ranks), ranks)).futures
            self._wait(dict(enumerate(refs)), cleanup_method, "shutdown", timeout)
        except Exception:  # noqa: BLE001 - logged with its traceback; the shutdown must continue
            _LOG.exception("%s failed during the shutdown of the workers", cleanup_method)
            return False
        return True

    def _contexts(self, device: str) -> list[WorkerContext]:
        """Wait until all processes are up; return the context of each rank, with a port that rank 0 has reserved."""
        ranks = range(self._sharding.size)
        self._pids = self._wait({rank: self._send(rank, "pid") for rank in ranks}, "starting its process", "start")
        address, deadline = self._address(), self._deadlines.call
        port = self._wait({0: self._send(0, "reserve", address)}, "reserving a port", "start")[0]
        context = WorkerContext(0, len(ranks), 0, address, port, device, deadline)
        return [self._context(rank, context) for rank in ranks]

    def _send(self, rank: int, method: str, *args: Any) -> Any:
        return self._call(rank, method, *args)()

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        self._require_usable(method_name)
        shared = self._store_shared(plan.kwargs)
        calls = []
        for worker, kwargs in zip(plan.called, plan.kwargs, strict=True):
            values = {name: shared.get(id(value), value) for name, value in kwargs.items()}
            calls.append(self._call(worker, "call", method_name, worker in plan.returned, values))
        _LOG.debug("calling %s on rank %s", method_name, list_ranks(plan.called))
        refs = [call() for call in calls]  # only now, so that an argument that cannot be sent reaches no worker
        return MultiWorkerFuture(refs, plan.returned, plan.called, method_name=method_name)

    def _store_shared(self, arguments: Sequence[Mapping[Any, Any]]) -> dict[int, Any]:
        """Store each value that several workers get once, by `id`."""
        sent = [{id(value): value for value in each.values() if not isinstance(value, SMALL)} for each in arguments]
        counts = Counter(key for each in sent for key in each)
        by_id = {key: value for each in sent for key, value in each.items()}
        return {key: self._shared(value) for key, value in by_id.items() if counts[key] > 1}

    def _require_usable(self, doing: str) -> None:
        if self._ended is not None:
            raise self._refusal(
                f"{doing}: the worker group is no longer usable: {self._ended}; create a new one, or a new Session"
            )

    def _wait(self, refs: Mapping[int, Any], doing: str, deadline: str, seconds: float | None = None) -> dict[int, Any]:
        """The results by rank. A failure, a missed deadline or an interrupt ends the group and is raised.

        `deadline` names the limit in `deadlines`, which for "start" includes all that came before; `seconds` overrides
        it.
        """
        limit = getattr(self._deadlines, deadline) if seconds is None else seconds
        until = limit + (self._started if deadline == "start" else time.monotonic())
        try:
            with debug_span(_LOG, "waiting at most %g s for %s of rank %s", limit, doing, list_ranks(list(refs))):
                results, failures = self._collect(refs, until)
            if failures:
                raise self._exception(failures, doing)
            if missing := sorted(refs.keys() - results.keys()):
                hint = self._describe_resources() if deadline == "start" else ""
                if seconds is None:
                    hint += f"If they just need more time, raise worker_group.deadlines.{deadline}"
                nodes = ",".join(sorted({self._location_text(rank) for rank in missing[:MOST_LISTED]} - {""}))
                raise DeadlineExceeded(
                    f"{doing}: no answer within {limit:g} s from rank {list_ranks(missing)} of "
                    f"{self._sharding.size}{nodes}; answered: {list_ranks(sorted(results)) or 'none'}. "
                    f"The workers were ended. {hint}"
                )
        except BaseException as error:
            first_line = str(error).partition("\n")[0]
            if self._ended is None and isinstance(error, WorkerLost | DeadlineExceeded):
                self._refusal = WorkerLost
            self._end(f"{doing} ended with {type(error).__name__}{first_line and f': {first_line}'}")
            raise
        return {rank: results[rank] for rank in refs}

    def _collect(self, refs: Mapping[int, Any], until: float) -> tuple[dict[int, Any], dict[int, HostFailure]]:
        """The results and failures that arrive in time, by rank; after a failure, those of the next moment."""
        pending = {ref: rank for rank, ref in refs.items()}
        results: dict[int, Any] = {}
        failures: dict[int, HostFailure] = {}
        while pending:
            left = min(max(until - time.monotonic(), 0.0), _LONGEST_WAIT)
            ready = self._wait_any(pending, left)
            if not ready:
                break
            for ref in ready:
                rank = pending.pop(ref)
                results[rank] = self._result(rank, ref)
                if isinstance(results[rank], HostFailure):
                    failures[rank] = results[rank]
                    until = min(until, time.monotonic() + _GRACE)
        return results, failures

    def _end(self, reason: str) -> bool:
        """Kill the processes and wait until they are gone; idempotent."""
        self._ended = self._ended or reason
        if self._gone is None:  # still None if this was interrupted: tried again when the program exits
            _LOG.debug("ending the processes of %d workers", self._sharding.size)
            gone, here = self._end_hosts(), machine.identity()
            gone = _wait_until_gone([pid for pid, where in self._pids.values() if where == here]) and gone
            self._on_ended()
            _LIVE.discard(self)
            self._gone = gone
            self._temporary.remove()
        return self._gone


class GroupArgumentError(ConfigError, ValueError):
    """An invalid argument of a worker group."""


def check_ranks(sharding: NamedSharding, workers: int) -> None:
    """Raise an error unless `sharding` holds the ranks of `workers` workers once each."""
    if sorted(sharding.layout.ravel().tolist()) != list(range(workers)):
        raise GroupArgumentError(f"the sharding must hold the ranks 0..{workers - 1} once each, got {sharding}")


def _wait_until_gone(pids: Sequence[int]) -> bool:
    awaited = set(pids)
    _, left = psutil.wait_procs([each for each in psutil.process_iter() if each.pid in awaited], KILL_WAIT)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return not left


def _end_all() -> None:
    for group in list(_LIVE):
        if group._driver == os.getpid():  # processes forked from the driver must not end its workers
            group._end("the program ended")


atexit.register(_end_all)


# -- in the worker's process ------------------------------------------------------------------------------------------


def find_target(spec: WorkerSpec) -> str:
    """The import path of the worker's class, looked up among the plugins that this process discovers.

    Raises `PluginError` if they differ from the driver's plugins.
    """
    if spec.fingerprint is None:
        return spec.target
    from rlframework.plugins.manager import create_manager

    manager = create_manager(modules=spec.plugins)
    manager.compare_fingerprint(spec.fingerprint)
    return manager.select(*spec.part).record.target if spec.part else spec.target


class WorkerHost(machine.PortReserver):
    """Hosts one worker. Cheap to construct; `start` imports the worker's module and constructs the worker."""

    def __init__(self, notified: Callable[[], bool] = never) -> None:
        """`notified`: see `WorkerContext`."""
        super().__init__()
        log_to_stderr()
        self._notified, self._rank = notified, -1
        self._worker: Any = None

    def pid(self) -> tuple[int, str]:
        """The process id and its `machine.identity`. A reply also shows that the process is up."""
        return os.getpid(), machine.identity()

    def start(self, spec: WorkerSpec, context: WorkerContext) -> None:
        """Compare plugins, import the worker's module and construct the worker."""
        self._rank = context.rank
        with debug_span(_LOG, "rank %d: constructing %s", context.rank, spec.target):
            worker_class = load_target(find_target(spec))
            machine.listen_for_gloo_at(context.node)
            self._worker = worker_class(**spec.kwargs, context=replace(context, notified=self._notified))

    def forget(self) -> None:
        """Drop a worker that was shut down, so that this process can `start` another."""
        self._worker = None
        gc.collect()

    def call(self, method_name: str, wants_result: bool, kwargs: Mapping[str, Any]) -> Any:
        """Call the worker; return its result if `wants_result`, otherwise None, which saves the transfer."""
        with debug_span(_LOG, "rank %d: %s", self._rank, method_name):
            result = getattr(self._worker, method_name)(**kwargs)
        return result if wants_result else None
