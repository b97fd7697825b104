"""`ConfiguredRayWorkerGroup`: the `RayWorkerGroup` that `worker_group.name=ray` selects, on a cluster of its own.

On a cluster, each worker reserves a CPU, and on CUDA a GPU. If this process has a private Ray, all workers run on this
machine, and CPUs are not reserved: other groups may use the same ones.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import ray

from rlframework.config.sections import RayGroupConfig
from rlframework.errors import ConfigError
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerSpec
from rlframework.workers import machine
from rlframework.workers.dispatch import DispatchingWorkerGroup
from rlframework.workers.ray import runtime
from rlframework.workers.ray.virtual_cluster import RayVirtualCluster
from rlframework.workers.ray.worker_builder import RayWorkerBuilder
from rlframework.workers.ray.worker_group import RayWorkerGroup
from rlframework.workers.remote_group import check_ranks

if TYPE_CHECKING:
    from rlframework.config.sections import WorkerGroupConfig
    from rlframework.interfaces.named_sharding import NamedSharding


class ConfiguredRayWorkerGroup(RayWorkerGroup):
    """One worker per rank of `sharding`. Ray itself is started if needed, and shut down with the last group.

    A worker on CUDA sees only its own GPU, as device 0. The ranks of a machine are consecutive.
    """

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        settings = config if isinstance(config, RayGroupConfig) else RayGroupConfig(**config.model_dump())
        check_ranks(sharding, sharding.size)
        _check(settings, sharding.size)
        python = settings.python or spec.py_executable
        passed = {name: os.environ[name] for name in settings.pass_environment if name in os.environ}
        self._owned = contextlib.ExitStack()
        runtime.acquire(id(self), settings.address, settings.listen)
        self._owned.callback(runtime.release, id(self))
        try:
            cluster = _reserve(settings, sharding.size, device)
            self._owned.callback(cluster.shutdown)
            super().__init__(
                cluster,
                RayWorkerBuilder.from_spec(spec),
                sharding_annotations=sharding,
                env_vars=passed | settings.environment,
                runtime_env={} if python is None else {"py_executable": python},
                deadlines=settings.deadlines,
            )
        except BaseException:
            self._owned.close()
            raise

    def run_single_worker_single_data(  # type: ignore[override]  # as in the interface
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_single_worker_single_data`."""
        return DispatchingWorkerGroup.run_single_worker_single_data(self, method_name, worker_idx, *args, **kwargs)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None, force: bool = False) -> bool:
        """See `WorkerGroup.shutdown`."""
        return super().shutdown(cleanup_method, self._deadlines.shutdown if timeout is None else timeout, force)

    def _on_ended(self) -> None:
        super()._on_ended()
        self._owned.close()


def _check(settings: RayGroupConfig, workers: int) -> None:
    """Reject what the cluster cannot run, before Ray is started."""
    if runtime.is_private(settings.address):
        machine.check_cores(workers)
        if settings.python is not None and not os.access(settings.python, os.X_OK):
            raise ConfigError(
                f"worker_group.python={settings.python} is not an executable on this machine: set it to the path of a "
                "Python"
            )
    elif settings.workers_per_node is not None and workers % settings.workers_per_node:
        raise ConfigError(
            f"worker_group.num_workers={workers} is not divisible by worker_group.workers_per_node="
            f"{settings.workers_per_node}: set it to a multiple"
        )


def _reserve(settings: RayGroupConfig, workers: int, device: str) -> RayVirtualCluster:
    """Reserve placement groups for all workers: one per node with `workers_per_node`, otherwise a single one."""
    private = runtime.is_private()
    if private and device == "cuda":
        machine.check_gpus(workers, int(ray.cluster_resources().get("GPU", 0)))  # type: ignore[no-untyped-call]
    each = None if private else settings.workers_per_node
    cluster = RayVirtualCluster(
        [workers] if each is None else [each] * (workers // each),
        use_gpus=device == "cuda",
        num_gpus_per_node=each or workers,
        name="rlframework-workers",
        placement_group_strategy=settings.placement.upper(),
        ready_timeout=settings.deadlines.start,
        cpus_per_worker=0 if private else 1,
    )
    cluster._init_placement_groups(use_unified_pg=each is None)
    return cluster
