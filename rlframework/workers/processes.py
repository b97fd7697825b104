"""`ProcessWorkerGroup`: N worker processes on this machine, without Ray.

They are forked from a process that has torch and transformers imported already (multiprocessing's fork server), so a
group of small workers is up in a second. More workers than cores are allowed. The driver's program must guard its
entry (`if __name__ == "__main__":`), as with all of multiprocessing, and what goes to workers must be picklable, which
a lambda is not. Left out: other machines, other Pythons, restarts.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

from rlframework.errors import ConfigError
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework.workers.hosted_group import HostedWorkerGroup
from rlframework.workers.process_peer import Answers, Peer, Surroundings

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
    "rlframework.models.varlen",
    "rlframework.policy.head.top_k",
    "rlframework.policy.optimization",
    "rlframework.policy.checkpoint.sharded",
    "rlframework.policy.worker",
    "rlframework.generation.transformers_engine",
    "rlframework.generation.worker",
    "rlframework.workers.freeze_imports",
)
"""What the process that workers are forked from has imported: slow to import, and of no effect but for the last."""

_imported_with: list[dict[str, str]] = []
"""Variables of `machine.PASSED_ON`, as the fork server's imports found them; empty before there is one."""


class _Pickled:
    """A value that was pickled once, to be sent to several."""

    def __init__(self, value: Any) -> None:
        self.data = _pickled(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


class ProcessWorkerGroup(HostedWorkerGroup):
    """One process for each rank of `sharding`. A worker on CUDA sees one GPU, its own, as device 0."""

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        self._peers: list[Peer] = []
        self._answers = Answers()
        self._gpus: list[str] = visible_gpus(self._sharding.size) if device == "cuda" else []
        if spec.py_executable is not None:
            raise ConfigError(
                f"the worker {spec.target} needs a Python of its own ({spec.py_executable}), which "
                "worker_group.name=processes cannot give: take worker_group.name=ray"
            )

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        method = _start_method()
        environment = machine.kept_environment() | machine.worker_environment(
            self._sharding.size, self._config.environment, self._config.pass_environment
        )
        for rank in range(self._sharding.size):
            own = {"CUDA_VISIBLE_DEVICES": self._gpus[rank]} if self._gpus else {}
            surroundings = Surroundings(environment | own, os.getcwd(), self._threads(rank))
            self._peers.append(self._peer(rank, method, surroundings))

    def _peer(self, rank: int, method: BaseContext, surroundings: Surroundings) -> Peer:
        """The process of `rank`, on its way."""
        return Peer(rank, method, surroundings, self._answers)

    def _ask(self, rank: int, method: str, *args: Any) -> Any:
        return self._peers[rank].ask(_pickled((method, args)))

    def _ask_all(self, method: str, calls: Sequence[tuple[int, tuple[Any, ...]]]) -> list[Any]:
        """Nobody is called unless all can be."""
        messages = [(rank, _pickled((method, args))) for rank, args in calls]
        return [self._peers[rank].ask(message) for rank, message in messages]

    def _shared(self, value: Any) -> Any:
        return _Pickled(value)

    def _threads(self, rank: int) -> int:
        return machine.threads_per_worker(self._sharding.size)

    def _ready(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        return self._answers.wait(refs, timeout)

    def _answer(self, rank: int, ref: Any) -> Any:
        return self._answers.take(ref)

    def _end_hosts(self) -> None:
        for peer in self._peers:
            peer.kill()
        for peer in self._peers:
            peer.close()
        self._peers = []


def visible_gpus(workers: int) -> list[str]:
    """A GPU for each worker, by the names that CUDA_VISIBLE_DEVICES has for them; a `ConfigError` with too few."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = named.split(",")[:count] if named else [str(index) for index in range(count)]
    if workers > len(gpus):
        raise ConfigError(
            f"worker_group.num_workers={workers} on device cuda, but there are {len(gpus)} GPU(s): set at most "
            f"{len(gpus)}, make more visible in CUDA_VISIBLE_DEVICES, or set device=cpu"
        )
    return gpus[:workers]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        raise TypeError(f"what goes to worker processes must be picklable: {type(error).__name__}: {error}") from error


def _start_method() -> BaseContext:
    """The fork server. A new interpreter where variables changed that its imports have read already."""
    now = {name: os.environ[name] for name in machine.PASSED_ON if name in os.environ}
    if not _imported_with:
        _imported_with.append(now)
    if _imported_with != [now]:
        return get_context("spawn")
    server = get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))  # asked for before its first process starts, and never again
    return server
