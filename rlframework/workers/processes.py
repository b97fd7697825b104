"""`ProcessWorkerGroup`: N worker processes on this machine, without Ray.

They are forked from a process that has already imported torch and transformers (multiprocessing's fork server), so a
group of small workers starts within a second. More workers than cores are allowed. The driver's program must guard its
entry point (`if __name__ == "__main__":`), as always with multiprocessing, and everything sent to workers must be
picklable, which a lambda is not. Not supported: other machines, other Python executables, restarts.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Sequence
from concurrent import futures
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import dispatch, machine
from rlframework.workers.failures import HostFailure
from rlframework.workers.process_peer import Peer, ProcessEnvironment
from rlframework.workers.remote_group import RemoteWorkerGroup

PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "rlframework.algorithms.losses",
    "rlframework.models.adapters",
    "rlframework.models.context_parallel",
    "rlframework.models.loading",
    "rlframework.models.probing",
    "rlframework.models.load_balancing",
    "rlframework.policy.head.patch",
    "rlframework.policy.optimization",
    "rlframework.policy.checkpoint.sharded",
    "rlframework.policy.worker",
    "rlframework.generation.transformers_engine",
    "rlframework.generation.worker",
    "rlframework.workers.freeze_imports",
)
"""Imported by the process that workers are forked from: slow imports without side effects, except for the last."""

_imported_with: list[dict[str, str]] = []
"""The variables of `machine.FORWARDED` as seen by the fork server's imports; empty before the server is started."""


class _Pickled:
    """A value that is pickled once and sent to several workers."""

    def __init__(self, value: Any) -> None:
        self.data = _pickled(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


class ProcessWorkerGroup(RemoteWorkerGroup):
    """One process per rank of `sharding`. A worker on CUDA sees only its own GPU, as device 0."""

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        self._peers: list[Peer] = []
        self._gpus: list[str] = visible_gpus(self._sharding.size) if device == "cuda" else []
        dispatch.reject_own_python(spec, "processes")

    def _start(self, spec: WorkerSpec, device: str) -> None:
        self._start_hosts(spec, device)
        contexts, shared = self._contexts(device), _Pickled(spec)
        started = {rank: self._send(rank, "start", shared, context) for rank, context in enumerate(contexts)}
        self._wait(started, f"constructing {spec.target}", "start")

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        """Start a process for each rank."""
        method = _start_method()
        environment = machine.inherited_environment() | machine.worker_environment(
            self._sharding.size, self._config.environment, self._config.pass_environment
        )
        for rank in range(self._sharding.size):
            own = {"CUDA_VISIBLE_DEVICES": self._gpus[rank]} if self._gpus else {}
            process_environment = ProcessEnvironment(environment | own, os.getcwd(), self._threads(rank))
            self._peers.append(self._peer(rank, method, process_environment))

    def _peer(self, rank: int, method: BaseContext, process_environment: ProcessEnvironment) -> Peer:
        """Start the process of `rank` in the background."""
        return Peer(rank, method, process_environment)

    def _send(self, rank: int, method: str, *args: Any) -> Any:
        return self._peers[rank].send(_pickled((method, args)))

    def _send_all(self, method: str, calls: Sequence[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        """Pickle all messages before sending the first, so that either all workers are called or none."""
        messages = [(rank, _pickled((method, args))) for rank, args in calls]
        return [self._peers[rank].send(message) for rank, message in messages]

    def _shared(self, value: Any) -> Any:
        return _Pickled(value)

    def _threads(self, rank: int) -> int:
        return machine.threads_per_worker(self._sharding.size)

    def _wait_any(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        limit = min(timeout, threading.TIMEOUT_MAX)
        return list(futures.wait(refs, limit, return_when=futures.FIRST_COMPLETED).done)

    def _result(self, rank: int, ref: Any) -> Any:
        result = ref.result()
        if isinstance(result, HostFailure):
            return result
        try:
            return pickle.loads(result)  # noqa: S301 - from a process that this one started
        except Exception as error:  # noqa: BLE001 - a result that cannot be unpickled is a failure of that rank
            return HostFailure.of(error)

    def _end_hosts(self) -> None:
        for peer in self._peers:
            peer.kill()
        for peer in self._peers:
            peer.close()
        self._peers = []


def visible_gpus(workers: int) -> list[str]:
    """One GPU per worker, as named in CUDA_VISIBLE_DEVICES; raises `ConfigError` if there are too few."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = named.split(",")[:count] if named else [str(index) for index in range(count)]
    machine.check_gpus(workers, len(gpus))
    return gpus[:workers]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        raise TypeError(
            f"values sent to worker processes must be picklable: {type(error).__name__}: {error}"
        ) from error


def _start_method() -> BaseContext:
    """The fork server, or a new interpreter if variables that the server's imports have read changed since."""
    now = {name: os.environ[name] for name in machine.FORWARDED if name in os.environ}
    if not _imported_with:
        _imported_with.append(now)
    if _imported_with != [now]:
        return get_context("spawn")
    server = get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))  # read only before the server starts its first process
    return server
