"""`RayWorkerGroup`: N worker processes on this machine, each a Ray actor.

Not here yet: several nodes, placement, GPUs shared between groups, transport of large tensors without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlframework.distributed import machine, ray_runtime
from rlframework.distributed.failures import HostFailure
from rlframework.distributed.hosted import HostedWorkerGroup
from rlframework.distributed.worker_host import WorkerHost
from rlframework.interfaces.worker_group import WorkerSpec


class RayWorkerGroup(HostedWorkerGroup):
    """One process for each rank of `sharding`. Ray itself is started if need be, and ended with the last group.

    A worker on CUDA sees one GPU, its own, as device 0. What several workers get alike is stored once.
    """

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        self._hosts: list[Any] = []
        machine.check_cores(self._sharding.size)
        ray_runtime.acquire(id(self))

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        """Actors on this node, without claiming cores, with a GPU on CUDA."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if device == "cuda":
            ray_runtime.check_gpus(self._sharding.size)
        runtime_env: dict[str, Any] = {"env_vars": machine.worker_environment(self._sharding.size)}
        if spec.py_executable is not None:
            runtime_env["py_executable"] = spec.py_executable
        node = ray.get_runtime_context().get_node_id()
        host = ray.remote(WorkerHost).options(
            num_cpus=0,
            num_gpus=1 if device == "cuda" else 0,
            runtime_env=runtime_env,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        self._hosts = [host.remote() for _ in range(self._sharding.size)]

    def _ask(self, rank: int, method: str, *args: Any) -> Any:
        return getattr(self._hosts[rank], method).remote(*args)

    def _shared(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def _threads(self) -> int:
        return machine.threads_per_worker(self._sharding.size)

    def _ready(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        import ray

        ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout)
        return list(ready)

    def _answer(self, rank: int, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            tail = ray_runtime.log_tail(self._pids[rank]) if rank in self._pids else ""
            return replace(HostFailure.of(error), message=f"{str(error).strip()}{tail}", died=True)
        except Exception as error:  # noqa: BLE001 - such as an answer that cannot be pickled
            return HostFailure.of(error)

    def _end_hosts(self) -> None:
        import ray

        for host in self._hosts if ray.is_initialized() else ():
            ray.kill(host)
        self._hosts = []

    def _released(self) -> None:
        ray_runtime.release(id(self))
