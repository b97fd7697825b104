"""`RayWorkerGroup`: N worker processes on this machine, each a Ray actor.

Not here yet: several nodes, placement, GPUs shared between groups, transport of large tensors without a copy.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from rlframework.distributed import dispatch, ray_runtime
from rlframework.distributed.dispatching import DispatchingWorkerGroup
from rlframework.distributed.failures import HostFailure, as_exception
from rlframework.distributed.worker_host import WorkerHost
from rlframework.errors import DeadlineExceeded, WorkerError
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec

if TYPE_CHECKING:
    from rlframework.config.sections import WorkerGroupConfig
    from rlframework.distributed.named_sharding import NamedSharding

_LOG = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds in which other ranks may still fail after the first one, so that the cause is blamed and not its echo."""
_KILL_WAIT = 5.0
_LIVE: weakref.WeakSet[RayWorkerGroup] = weakref.WeakSet()


@dataclass
class _Call(MultiWorkerFuture):
    """A future that knows what was called, for messages."""

    method_name: str = "a call"


class RayWorkerGroup(DispatchingWorkerGroup):
    """One process for each rank of `sharding`. Ray itself is started if need be, and ended with the last group.

    A worker on CUDA sees one GPU, its own, as device 0. What several workers get alike is stored once.
    """

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        if sorted(sharding.layout.ravel().tolist()) != list(range(sharding.size)):
            raise ValueError(f"the ranks of a worker group are 0..{sharding.size - 1}, got {sharding}")
        super().__init__(sharding)
        self._deadlines = config.deadlines
        self._ended: str | None = None
        self._hosts: list[Any] = []
        self._pids: dict[int, int] = {}
        ray_runtime.check_cores(sharding.size)
        ray_runtime.acquire(id(self))
        _LIVE.add(self)
        try:
            if device == "cuda":
                ray_runtime.check_gpus(sharding.size)
            self._start(spec, device)
        except BaseException:
            self._end("its workers did not start")
            raise

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Wait, at most `deadlines.call` seconds; the first failure ends the group."""
        self._require_usable("waiting for results")
        called = range(len(future.futures)) if future.called_workers is None else future.called_workers
        refs = dict(zip(called, future.futures, strict=True))
        doing = future.method_name if isinstance(future, _Call) else "a call"
        return dispatch.keep_results(future, list(self._wait(refs, doing, "call", self._deadlines.call).values()))

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """Call `cleanup_method` on all, then end the processes; see `WorkerGroup`."""
        peaceful = True
        if self._ended is None and cleanup_method is not None:
            plan = dispatch.dispatch_single_data(self._sharding, {})
            refs = dict(zip(plan.called, self._run(cleanup_method, plan).futures, strict=True))
            try:
                self._wait(refs, cleanup_method, "shutdown", self._deadlines.shutdown if timeout is None else timeout)
            except Exception:  # noqa: BLE001 - logged with its traceback; shutting down must go on
                _LOG.exception("%s failed while the workers were shut down", cleanup_method)
                peaceful = False
        return self._end("it was shut down") and peaceful

    def _start(self, spec: WorkerSpec, device: str) -> None:
        begun, seconds = time.monotonic(), self._deadlines.start
        self._hosts = [host.remote() for host in self._actor_classes(spec, device)]

        def wait(refs: dict[int, Any], doing: str) -> dict[int, Any]:
            return self._wait(refs, doing, "start", seconds, begun)

        self._pids = wait({rank: host.pid.remote() for rank, host in enumerate(self._hosts)}, "starting its process")
        address, port = wait({0: self._hosts[0].reserve_address.remote()}, "reserving a port")[0]
        context = WorkerContext(
            world_size=self._sharding.size,
            master_addr=address,
            master_port=port,
            device=device,
            deadline=self._deadlines.call,
            threads=ray_runtime.threads_per_worker(self._sharding.size),
        )
        import ray

        shared = ray.put(spec)
        contexts = [replace(context, rank=rank, local_rank=rank) for rank in range(self._sharding.size)]
        refs = {rank: self._hosts[rank].start.remote(shared, context) for rank, context in enumerate(contexts)}
        wait(refs, f"constructing {spec.target}")

    def _actor_classes(self, spec: WorkerSpec, device: str) -> list[Any]:
        """The host as an actor class for each rank: on this node, without claiming cores, with a GPU on CUDA."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        runtime_env: dict[str, Any] = {"env_vars": ray_runtime.worker_environment(self._sharding.size)}
        if spec.py_executable is not None:
            runtime_env["py_executable"] = spec.py_executable
        node = ray.get_runtime_context().get_node_id()
        host = ray.remote(WorkerHost).options(
            num_cpus=0,
            num_gpus=1 if device == "cuda" else 0,
            runtime_env=runtime_env,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return [host] * self._sharding.size

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        self._require_usable(method_name)
        shared = _store_shared(plan.kwargs)
        refs = [
            self._hosts[worker].call.remote(
                method_name, worker in plan.kept, list(kwargs), *[shared.get(id(v), v) for v in kwargs.values()]
            )
            for worker, kwargs in zip(plan.called, plan.kwargs, strict=True)
        ]
        return _Call(refs, return_from_workers=plan.kept, called_workers=plan.called, method_name=method_name)

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
        import ray

        pending = {ref: rank for rank, ref in refs.items()}
        answers: dict[int, Any] = {}
        failures: dict[int, HostFailure] = {}
        until = begun + seconds
        while pending:
            left = until - time.monotonic()
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(left, 0.0))
            if not ready:
                break
            for ref in ready:
                rank = pending.pop(ref)
                answers[rank] = self._answer(rank, ref)
                if isinstance(answers[rank], HostFailure):
                    failures[rank] = answers[rank]
                    until = min(until, time.monotonic() + _GRACE)
        if failures:
            raise as_exception(failures, self._sharding.size, doing)
        if pending:
            self._tell_deadline(sorted(pending.values()), sorted(answers), doing, deadline, seconds)
        return {rank: answers[rank] for rank in refs}

    def _answer(self, rank: int, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            tail = ray_runtime.log_tail(self._pids[rank]) if rank in self._pids else ""
            return replace(HostFailure.of(error), message=f"{str(error).strip()}{tail}", died=True)
        except Exception as error:  # noqa: BLE001 - such as an answer that cannot be pickled
            return HostFailure.of(error)

    def _tell_deadline(
        self, missing: list[int], answered: list[int], doing: str, deadline: str, seconds: float
    ) -> NoReturn:
        size = self._sharding.size
        raise DeadlineExceeded(
            f"{doing}: no answer within {seconds:g} s from rank {', '.join(map(str, missing))} of {size}; answered: "
            f"{', '.join(map(str, answered)) or 'none'}. The workers were ended. If they only need longer, raise "
            f"worker_group.deadlines.{deadline}"
        )

    def _end(self, reason: str) -> bool:
        """Kill the processes and wait until they are gone; idempotent."""
        if self._ended is not None:
            return True
        self._ended = reason
        import ray

        for host in self._hosts if ray.is_initialized() else ():
            ray.kill(host)
        self._hosts = []
        gone = _wait_until_gone(self._pids.values())
        ray_runtime.release(id(self))
        _LIVE.discard(self)
        return gone


def _store_shared(shares: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
    """References to the values that several workers get, by `id`; small ones go along with each call."""
    import ray

    counts: dict[int, int] = {}
    values: dict[int, Any] = {}
    for share in shares:
        for value in share.values():
            counts[id(value)] = counts.get(id(value), 0) + 1
            values[id(value)] = value
    small = (type(None), bool, int, float, str)
    return {key: ray.put(value) for key, value in values.items() if counts[key] > 1 and not isinstance(value, small)}


def _wait_until_gone(pids: Iterable[int]) -> bool:
    left = list(pids)
    until = time.monotonic() + _KILL_WAIT
    while left and time.monotonic() < until:
        left = [pid for pid in left if _is_running(pid)]
        time.sleep(0.02 if left else 0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end_all() -> None:
    for group in list(_LIVE):
        group._end("the program ended")


atexit.register(_end_all)
