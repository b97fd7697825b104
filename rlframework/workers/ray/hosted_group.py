"""`RayHostedGroup`: N worker processes, each a Ray actor, on this machine or on those of a Ray cluster.

Where this process has a Ray of its own, all workers are on this machine, and nothing is reserved. On a cluster each
worker has a CPU, and a GPU on CUDA, of a placement group. What goes to workers is stored once and read there without a
copy, see `transport`. Not here: GPUs that several groups share (`worker_groups.RayWorkerGroup`).
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlframework.errors import ConfigError
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine
from rlframework.workers.dispatch import is_small
from rlframework.workers.failures import HostFailure
from rlframework.workers.hosted_group import HostedWorkerGroup, Place
from rlframework.workers.ray import placement, runtime, transport, virtual_cluster
from rlframework.workers.ray.host import RayWorkerHost
from rlframework.workers.ray.placement import Placement

if TYPE_CHECKING:
    from rlframework.config.sections import RayGroupConfig

_REMOTE_KILL_WAIT = 5.0


class RayHostedGroup(HostedWorkerGroup):
    """One process for each rank of `sharding`. Ray itself is started if need be, and ended with the last group.

    A worker on CUDA sees one GPU, its own, as device 0. Ranks of one machine follow each other.
    """

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        self._hosts: list[Any] = []
        self._cluster: virtual_cluster.RayVirtualCluster | None = None
        self._places: list[Placement] = []
        self._settings = settings = as_ray(self._config)
        if runtime.would_be_private(settings.address):
            machine.check_cores(self._sharding.size)
            _check_python(settings.python)
        elif settings.workers_per_node is not None and self._sharding.size % settings.workers_per_node:
            raise ConfigError(
                f"worker_group.num_workers={self._sharding.size} does not divide by worker_group.workers_per_node="
                f"{settings.workers_per_node}: make it a multiple"
            )
        runtime.acquire(id(self), settings.address, settings.listen)

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        import ray

        if runtime.is_private():
            if device == "cuda":
                runtime.check_gpus(self._sharding.size)
        else:
            self._cluster = self._reserved(device)
            self._places = self._cluster.placements()
        self._cores, self._names = runtime.cores_and_names()
        actor = ray.remote(RayWorkerHost)
        for rank in range(self._sharding.size):
            runtime_env: dict[str, Any] = {"env_vars": self._environment(rank)}
            python = self._settings.python or spec.py_executable
            if python is not None:
                runtime_env["py_executable"] = python
            self._hosts.append(actor.options(runtime_env=runtime_env, **self._room(rank, device)).remote())

    def _reserved(self, device: str) -> virtual_cluster.RayVirtualCluster:
        """Placement groups for all workers: one a node with `workers_per_node`, or one for all."""
        each, size = self._settings.workers_per_node, self._sharding.size
        cluster = virtual_cluster.RayVirtualCluster(
            [size] if each is None else [each] * (size // each),
            use_gpus=device == "cuda",
            num_gpus_per_node=each or size,
            name="rlframework-workers",
            placement_group_strategy=self._settings.placement.upper(),
            ready_timeout=self._deadlines.start,
        )
        cluster._init_placement_groups(use_unified_pg=each is None)
        return cluster

    def _room(self, rank: int, device: str) -> dict[str, Any]:
        """Ray's options that say where the worker goes and what it takes."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        gpus = 1 if device == "cuda" else 0
        if self._cluster is None:
            node = ray.get_runtime_context().get_node_id()
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            return {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": here}
        place = self._places[rank]
        bundle = PlacementGroupSchedulingStrategy(
            self._cluster.get_placement_groups()[place.group], placement_group_bundle_index=place.bundle
        )
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": bundle}

    def _environment(self, rank: int) -> dict[str, str]:
        """The environment variables of a worker, by name."""
        workers, cores = self._sharding.size, None
        if self._places:
            node = self._places[rank].node_id
            workers = Counter(place.node_id for place in self._places)[node]
            cores = self._cores.get(node)
        return machine.worker_environment(
            workers,
            self._settings.environment,
            self._settings.pass_environment,
            cores=cores,
            one_machine=not self._several_nodes(),
        )

    def _several_nodes(self) -> bool:
        return len({place.node_id for place in self._places}) > 1

    def _place(self, rank: int) -> Place:
        if self._cluster is None:
            return super()._place(rank)
        place = self._places[rank]
        node = place.address if self._several_nodes() else ""
        return Place(place.node_rank, place.local_rank, node, self._cluster.address_of(place))

    def _where(self, rank: int) -> str:
        if not self._places:
            return f" on node {platform.node()}"
        place = self._places[rank]
        return f" on node {self._names.get(place.node_id, '')} ({place.address}, {place.node_id[:8]})"

    def _what_is_there(self) -> str:
        if self._cluster is None:
            return ""
        bundle = self._cluster.bundle
        has = placement.describe_machines(virtual_cluster._machines(), list(bundle))
        asked = f"{self._sharding.size} workers with {placement.describe(bundle)} each"
        return f"Asked were {asked}; the Ray cluster has\n{has}\n"

    def _ask(self, rank: int, method: str, *args: Any) -> Any:
        if method == "call":
            return self._call(rank, *args)
        return getattr(self._hosts[rank], method).remote(*args)

    def _call(self, rank: int, method_name: str, wants_result: bool, names: Sequence[str], *values: Any) -> Any:
        arguments = transport.call_arguments(method_name, wants_result, names, values)
        return self._hosts[rank].call_packed.remote(*arguments)

    def _own(self, value: Any) -> Any:
        """`value`, as an argument of its own."""
        return transport.Packed(value)

    def _sent(self, value: Any) -> Any:
        """The same; what is small stays as it is."""
        return value if is_small(value) else self._own(value)

    def _shared(self, value: Any) -> Any:
        import ray

        return ray.put(transport.Packed(value))

    def _threads(self, rank: int) -> int | None:
        threads = self._environment(rank)["OMP_NUM_THREADS"]
        return int(threads) if threads.isdigit() else None

    def _ready(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        import ray

        ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout)
        return list(ready)

    def _answer(self, rank: int, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            message = f"{str(error).strip()}{self._last_words(rank)}"
            return replace(HostFailure.of(error), message=message, died=True)
        except Exception as error:  # noqa: BLE001 - such as an answer that cannot be pickled
            return HostFailure.of(error)

    def _last_words(self, rank: int) -> str:
        if rank in self._pids and ((tail := runtime.log_tail(self._pids[rank])) or not self._places):
            return tail
        pid, node = self._pids.get(rank) or self._elsewhere.get(rank), self._places[rank].node_id
        if node not in runtime.cores_and_names()[0]:
            return "\nits node has left the cluster"
        return "" if pid is None else runtime.log_tail_of(node, pid)

    def _end_hosts(self) -> None:
        import ray

        for host in self._hosts if ray.is_initialized() else ():
            ray.kill(host)

    def _others_gone(self, ranks: Sequence[int]) -> bool:
        """Ray says that the actors on other machines have ended; a machine that is gone took them along."""
        until = time.monotonic() + _REMOTE_KILL_WAIT
        left = [self._hosts[rank] for rank in ranks]
        while left and time.monotonic() < until:
            left = [host for host in left if not runtime.is_dead(host)]
            time.sleep(0.05 if left else 0)
        return not left

    def _released(self) -> None:
        self._hosts = []
        if self._cluster is not None:
            self._cluster.shutdown()
        runtime.release(id(self))


def as_ray(config: Any) -> RayGroupConfig:
    """`config` with the keys of this group."""
    from rlframework.config.sections import RayGroupConfig

    return config if isinstance(config, RayGroupConfig) else RayGroupConfig(**config.model_dump())


def _check_python(python: str | None) -> None:
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(f"worker_group.python={python}: there is no such program here; give the path of a Python")
