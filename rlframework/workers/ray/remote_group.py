"""`RayRemoteWorkerGroup`: N worker processes, each a Ray actor, on this machine or on those of a Ray cluster.

If this process has a private Ray, all workers run on this machine and nothing is reserved. On a cluster each worker
gets a CPU, and on CUDA a GPU, of a placement group. Values sent to workers are stored once and read there without a
copy, see `transport`. Does not cover GPUs shared by several groups: see `worker_group.RayWorkerGroup`.
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
from rlframework.workers.ray import placement, runtime, transport, virtual_cluster
from rlframework.workers.ray.placement import Placement
from rlframework.workers.ray.worker_actor import RayWorkerHost
from rlframework.workers.remote_group import RemoteWorkerGroup, WorkerLocation

if TYPE_CHECKING:
    from rlframework.config.sections import RayGroupConfig

_REMOTE_KILL_WAIT = 5.0


class RayRemoteWorkerGroup(RemoteWorkerGroup):
    """One process per rank of `sharding`. Ray itself is started if needed, and shut down with the last group.

    A worker on CUDA sees only its own GPU, as device 0. The ranks of a machine are consecutive.
    """

    def _prepare(self, spec: WorkerSpec, device: str) -> None:
        self._hosts: list[Any] = []
        self._cluster: virtual_cluster.RayVirtualCluster | None = None
        self._placements: list[Placement] = []
        self._settings = settings = as_ray_config(self._config)
        if runtime.would_be_private(settings.address):
            machine.check_cores(self._sharding.size)
            _check_python(settings.python)
        elif settings.workers_per_node is not None and self._sharding.size % settings.workers_per_node:
            raise ConfigError(
                f"worker_group.num_workers={self._sharding.size} is not divisible by worker_group.workers_per_node="
                f"{settings.workers_per_node}: set it to a multiple"
            )
        runtime.acquire(id(self), settings.address, settings.listen)

    def _start_hosts(self, spec: WorkerSpec, device: str) -> None:
        import ray

        if runtime.is_private():
            if device == "cuda":
                runtime.check_gpus(self._sharding.size)
        else:
            self._cluster = self._reserve_cluster(device)
            self._placements = self._cluster.placements()
        self._cores, self._names = runtime.cores_and_names()
        actor = ray.remote(RayWorkerHost)
        for rank in range(self._sharding.size):
            runtime_env: dict[str, Any] = {"env_vars": self._environment(rank)}
            python = self._settings.python or spec.py_executable
            if python is not None:
                runtime_env["py_executable"] = python
            self._hosts.append(
                actor.options(runtime_env=runtime_env, **self._scheduling_options(rank, device)).remote()
            )

    def _reserve_cluster(self, device: str) -> virtual_cluster.RayVirtualCluster:
        """Reserve placement groups for all workers: one per node with `workers_per_node`, otherwise a single one."""
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

    def _scheduling_options(self, rank: int, device: str) -> dict[str, Any]:
        """Ray's options for the node and the resources of a worker."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        gpus = 1 if device == "cuda" else 0
        if self._cluster is None:
            node = ray.get_runtime_context().get_node_id()
            this_node = NodeAffinitySchedulingStrategy(node, soft=False)
            return {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": this_node}
        place = self._placements[rank]
        bundle = PlacementGroupSchedulingStrategy(
            self._cluster.get_placement_groups()[place.group], placement_group_bundle_index=place.bundle
        )
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": bundle}

    def _environment(self, rank: int) -> dict[str, str]:
        """The environment variables of a worker."""
        workers, cores = self._sharding.size, None
        if self._placements:
            node = self._placements[rank].node_id
            workers = Counter(place.node_id for place in self._placements)[node]
            cores = self._cores.get(node)
        return machine.worker_environment(
            workers,
            self._settings.environment,
            self._settings.pass_environment,
            cores=cores,
            one_machine=not self._several_nodes(),
        )

    def _several_nodes(self) -> bool:
        return len({place.node_id for place in self._placements}) > 1

    def _location(self, rank: int) -> WorkerLocation:
        if self._cluster is None:
            return super()._location(rank)
        place = self._placements[rank]
        node = place.address if self._several_nodes() else ""
        return WorkerLocation(place.node_rank, place.local_rank, node, self._cluster.address_of(place))

    def _location_text(self, rank: int) -> str:
        if not self._placements:
            return f" on node {platform.node()}"
        place = self._placements[rank]
        return f" on node {self._names.get(place.node_id, '')} ({place.address}, {place.node_id[:8]})"

    def _describe_resources(self) -> str:
        if self._cluster is None:
            return ""
        bundle = self._cluster.bundle
        available = placement.describe_machines(virtual_cluster._machines(), list(bundle))
        requested = f"{self._sharding.size} workers with {placement.describe(bundle)} each"
        return f"Requested: {requested}. The Ray cluster has\n{available}\n"

    def _send(self, rank: int, method: str, *args: Any) -> Any:
        if method == "call":
            return self._call(rank, *args)
        return getattr(self._hosts[rank], method).remote(*args)

    def _call(self, rank: int, method_name: str, wants_result: bool, names: Sequence[str], *values: Any) -> Any:
        arguments = transport.call_arguments(method_name, wants_result, names, values)
        return self._hosts[rank].call_packed.remote(*arguments)

    def _own(self, value: Any) -> Any:
        """`value`, packed as a separate argument."""
        return transport.Packed(value)

    def _sent(self, value: Any) -> Any:
        """The same, but leave small values unpacked."""
        return value if is_small(value) else self._own(value)

    def _shared(self, value: Any) -> Any:
        import ray

        return ray.put(transport.Packed(value))

    def _threads(self, rank: int) -> int | None:
        threads = self._environment(rank)["OMP_NUM_THREADS"]
        return int(threads) if threads.isdigit() else None

    def _wait_any(self, refs: Sequence[Any], timeout: float) -> list[Any]:
        import ray

        ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout)
        return list(ready)

    def _result(self, rank: int, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            message = f"{str(error).strip()}{self._stderr_tail(rank)}"
            return replace(HostFailure.of(error), message=message, died=True)
        except Exception as error:  # noqa: BLE001 - for example a result that cannot be pickled
            return HostFailure.of(error)

    def _stderr_tail(self, rank: int) -> str:
        if rank in self._pids and ((tail := runtime.log_tail(self._pids[rank])) or not self._placements):
            return tail
        pid, node = self._pids.get(rank) or self._remote_pids.get(rank), self._placements[rank].node_id
        if node not in runtime.cores_and_names()[0]:
            return "\nits node has left the cluster"
        return "" if pid is None else runtime.log_tail_of(node, pid)

    def _end_hosts(self) -> None:
        import ray

        for host in self._hosts if ray.is_initialized() else ():
            ray.kill(host)

    def _wait_for_other_machines(self, ranks: Sequence[int]) -> bool:
        """Wait until Ray reports that the actors on other machines have ended, or their machines are gone."""
        until = time.monotonic() + _REMOTE_KILL_WAIT
        left = [self._hosts[rank] for rank in ranks]
        while left and time.monotonic() < until:
            left = [host for host in left if not runtime.is_dead(host)]
            time.sleep(0.05 if left else 0)
        return not left

    def _on_ended(self) -> None:
        self._hosts = []
        if self._cluster is not None:
            self._cluster.shutdown()
        runtime.release(id(self))


def as_ray_config(config: Any) -> RayGroupConfig:
    """Return `config` validated as the section of a `ray` group."""
    from rlframework.config.sections import RayGroupConfig

    return config if isinstance(config, RayGroupConfig) else RayGroupConfig(**config.model_dump())


def _check_python(python: str | None) -> None:
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(
            f"worker_group.python={python} is not an executable on this machine: set it to the path of a Python"
        )
