"""What worker groups in other processes share: starting `WorkerHost`s, waiting for them, failures, deadlines, the end.

A group says how a process is started, asked and ended. A *ref* is its handle of an answer on its way.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util  # noqa: F401 - its handler at exit waits for children: ours, registered later, goes first
import os
import signal
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlframework.errors import DeadlineExceeded, WorkerError
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec
from rlframework.workers import dispatch, machine
from rlframework.workers.dispatch import DispatchingWorkerGroup, is_small
from rlframework.workers.failures import HostFailure, as_exception

if TYPE_CHECKING:
    from rlframework.config.sections import HostedGroupConfig, WorkerGroupConfig
    from rlframework.interfaces.named_sharding import NamedSharding

_LOG = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds in which other ranks may still fail after the first one, so that the cause is blamed and not its echo."""
_KILL_WAIT = 5.0
_BURIAL = 1.0
"""Seconds in which whoever started a process should have noticed its end."""
_LIVE: weakref.WeakSet[HostedWorkerGroup] = weakref.WeakSet()


@dataclass(frozen=True)
class Place:
    """Where a worker is: see `WorkerContext`. At `address` of its machine it can listen for the others."""

    node_rank: int
    local_rank: int
    node: str
    address: str


@dataclass
class Call(MultiWorkerFuture):
    """A future that knows what was called, for messages."""

    method_name: str = "a call"


class HostedWorkerGroup(DispatchingWorkerGroup):
    """One process for each rank of `sharding`, each with a `WorkerHost`."""

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        if sorted(sharding.layout.ravel().tolist()) != list(range(sharding.size)):
            raise ValueError(f"the ranks of a worker group are 0..{sharding.size - 1}, got {sharding}")
        super().__init__(sharding)
        self._config = as_hosted(config)
        self._deadlines = config.deadlines
        self._ended: str | None = None
        self._gone: bool | None = None
        self._driver = os.getpid()
        self._pids: dict[int, int] = {}
        self._elsewhere: dict[int, int] = {}
        self._prepare(spec, device)
        _LIVE.add(self)
        try:
            self._start(spec, device)
        except BaseException:
            self._end("its workers did not start")
            raise

    # -- what a group says --------------------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        """Refuse what this machine cannot do, before anything is started."""

    @abstractmethod
    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        """Start a process with a `WorkerHost` for each rank."""

    @abstractmethod
    def _ask(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method of the `WorkerHost` of `rank`; a ref. A `TypeError` where an argument cannot be sent."""

    @abstractmethod
    def _ready(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        """Those of `refs` whose answer is there, after at most `timeout` seconds; none: time is over."""

    @abstractmethod
    def _answer(self, rank: int, ref: Any) -> Any:
        """The answer, or a `HostFailure` where the process died."""

    @abstractmethod
    def _end_hosts(self) -> None:
        """Kill the processes."""

    def _ask_all(self, method: str, calls: Sequence[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        """Call a method of several hosts, given as ranks and arguments; refs. All are called, or the group ends."""
        refs: list[Any] = []
        try:
            for rank, args in calls:
                refs.append(self._ask(rank, method, *args))
        except BaseException:
            if refs:
                self._end(f"{method} could not be sent to all workers")
            raise
        return refs

    def _released(self) -> None:
        """Called when the processes are gone."""

    def _shared(self, value: Any) -> Any:
        """`value`, which goes to all ranks, in a form that is stored once."""
        return value

    def _threads(self, rank: int) -> int | None:
        """Threads of a worker."""
        return None

    def _place(self, rank: int) -> Place:
        """Where a worker is. Asked when the processes are up."""
        return Place(0, rank, "", "127.0.0.1")

    def _where(self, rank: int) -> str:
        """The same for messages, to stand behind the rank; empty where there is nothing to tell."""
        return ""

    def _what_is_there(self) -> str:
        """What the machines have and what of it was asked, for messages; empty where there is nothing to tell."""
        return ""

    def _others_gone(self, ranks: Sequence[int]) -> bool:
        """Wait, for a short time, until the processes on other machines have ended."""
        return True

    # -- the rest is the same -----------------------------------------------------------------------------------------

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Wait, at most `deadlines.call` seconds; the first failure ends the group."""
        self._require_usable("waiting for results")
        called = range(len(future.futures)) if future.called_workers is None else future.called_workers
        refs = dict(zip(called, future.futures, strict=True))
        doing = future.method_name if isinstance(future, Call) else "a call"
        own = future.deadline is not None
        seconds = self._deadlines.call if future.deadline is None else future.deadline
        return dispatch.keep_results(future, list(self._wait(refs, doing, "" if own else "call", seconds).values()))

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """Call `cleanup_method` on all, then end the processes; see `WorkerGroup`."""
        peaceful = self._clean_up(cleanup_method, timeout)
        return self._end("it was shut down") and peaceful

    def _clean_up(self, cleanup_method: str | None, timeout: float | None) -> bool:
        """Whether the call came to its end, or there is none to make."""
        if self._ended is not None or cleanup_method is None:
            return True
        plan = dispatch.dispatch_single_data(self._sharding, {})
        refs = dict(zip(plan.called, self._run(cleanup_method, plan).futures, strict=True))
        try:
            self._wait(refs, cleanup_method, "shutdown", self._deadlines.shutdown if timeout is None else timeout)
        except Exception:  # noqa: BLE001 - logged with its traceback; shutting down must go on
            _LOG.exception("%s failed while the workers were shut down", cleanup_method)
            return False
        return True

    def _start(self, spec: WorkerSpec, device: str) -> None:
        begun, seconds, ranks = time.monotonic(), self._deadlines.start, range(self._sharding.size)
        self._start_hosts(spec, device)

        def wait(refs: dict[int, Any], doing: str) -> dict[int, Any]:
            return self._wait(refs, doing, "start", seconds, begun)

        up = wait({rank: self._ask(rank, "pid") for rank in ranks}, "starting its process")
        for rank, (pid, where) in up.items():
            (self._pids if where == machine.identity() else self._elsewhere)[rank] = pid
        places = [self._place(rank) for rank in ranks]
        address, port = wait({0: self._ask(0, "reserve_address", places[0].address)}, "reserving a port")[0]
        context = WorkerContext(
            world_size=self._sharding.size,
            master_addr=address,
            master_port=port,
            device=device,
            deadline=self._deadlines.call,
        )
        shared = self._shared(spec)
        contexts = [
            replace(
                context,
                rank=rank,
                local_rank=places[rank].local_rank,
                node_rank=places[rank].node_rank,
                node=places[rank].node,
                threads=self._threads(rank),
            )
            for rank in ranks
        ]
        refs = {rank: self._ask(rank, "start", shared, contexts[rank]) for rank in ranks}
        wait(refs, f"constructing {spec.target}")

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        self._require_usable(method_name)
        shared = self._store_shared(plan.kwargs)
        calls = [
            (
                worker,
                (
                    method_name,
                    worker in plan.kept,
                    tuple(kwargs),
                    *[shared[id(value)] if id(value) in shared else self._argument(value) for value in kwargs.values()],
                ),
            )
            for worker, kwargs in zip(plan.called, plan.kwargs, strict=True)
        ]
        refs = self._ask_all("call", calls)
        return Call(refs, return_from_workers=plan.kept, called_workers=plan.called, method_name=method_name)

    def _store_shared(self, shares: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
        """The values that several workers get, stored once, by `id`; small ones go along with each call."""
        counts: dict[int, int] = {}
        values: dict[int, Any] = {}
        for share in shares:
            for value in share.values():
                counts[id(value)] = counts.get(id(value), 0) + 1
                values[id(value)] = value
        return {key: self._shared(value) for key, value in values.items() if counts[key] > 1 and not is_small(value)}

    def _argument(self, value: Any) -> Any:
        """`value`, which one rank gets, in the form in which `_ask` takes it."""
        return value

    def _require_usable(self, doing: str) -> None:
        if self._ended is not None:
            raise WorkerError(f"{doing}: the worker group is not usable any more: {self._ended}; make a new one")

    def _wait(
        self, refs: dict[int, Any], doing: str, deadline: str, seconds: float, begun: float | None = None
    ) -> dict[int, Any]:
        """The answers by rank; on a failure, a deadline or an interrupt the group is ended and the reason raised."""
        try:
            return self._collect(refs, doing, deadline, seconds, time.monotonic() if begun is None else begun)
        except BaseException as error:
            self._end(f"{doing} ended with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            raise

    def _collect(self, refs: dict[int, Any], doing: str, deadline: str, seconds: float, begun: float) -> dict[int, Any]:
        pending = {ref: rank for rank, ref in refs.items()}
        answers: dict[int, Any] = {}
        failures: dict[int, HostFailure] = {}
        until = begun + seconds
        while pending:
            ready = self._ready(list(pending), max(until - time.monotonic(), 0.0))
            if not ready:
                break
            for ref in ready:
                rank = pending.pop(ref)
                answers[rank] = self._answer(rank, ref)
                if isinstance(answers[rank], HostFailure):
                    failures[rank] = answers[rank]
                    until = min(until, time.monotonic() + _GRACE)
        if failures:
            raise as_exception(failures, self._sharding.size, doing, self._where)
        if pending:
            self._tell_deadline(sorted(pending.values()), sorted(answers), doing, deadline, seconds)
        return {rank: answers[rank] for rank in refs}

    def _tell_deadline(
        self, missing: list[int], answered: list[int], doing: str, deadline: str, seconds: float
    ) -> NoReturn:
        size = self._sharding.size
        nodes = {self._where(rank) for rank in missing} - {""}
        raise DeadlineExceeded(
            f"{doing}: no answer within {seconds:g} s from rank {', '.join(map(str, missing))} of {size}"
            f"{','.join(sorted(nodes))}; answered: {', '.join(map(str, answered)) or 'none'}. The workers were ended. "
            + (self._what_is_there() if deadline == "start" else "")
            + (f"If they only need longer, raise worker_group.deadlines.{deadline}" if deadline else "")
        )

    def _end(self, reason: str) -> bool:
        """Kill the processes and wait until they are gone; idempotent."""
        self._ended = self._ended or reason
        if self._gone is None:  # an interrupt on the way leaves it so: the end of the program tries again
            self._end_hosts()
            gone = _wait_until_gone(self._pids.values()) and self._others_gone(sorted(self._elsewhere))
            self._released()
            _LIVE.discard(self)
            self._gone = gone
        return self._gone


def as_hosted(config: WorkerGroupConfig) -> HostedGroupConfig:
    """`config` with the keys that all groups of processes have."""
    from rlframework.config.sections import HostedGroupConfig

    return config if isinstance(config, HostedGroupConfig) else HostedGroupConfig(**config.model_dump())


def _wait_until_gone(pids: Iterable[int]) -> bool:
    left, begun = list(pids), time.monotonic()
    while left and (waited := time.monotonic() - begun) < _KILL_WAIT:
        left = [pid for pid in left if _exists(pid) and (waited < _BURIAL or not _is_zombie(pid))]
        time.sleep(0.02 if left else 0)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not left


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the second: the number is another user's process by now
        return False
    return True


def _is_zombie(pid: int) -> bool:
    """Whether it ended and its parent, which may be a container's first process, has not asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def _end_all() -> None:
    for group in list(_LIVE):
        if group._driver == os.getpid():  # a process that was forked from the driver ends none of its workers
            group._end("the program ended")


atexit.register(_end_all)
