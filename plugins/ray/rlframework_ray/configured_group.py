"""`ConfiguredRayWorkerGroup`: the `RayWorkerGroup` that `worker_group.name=ray` selects, on a cluster of its own.

On a cluster, each worker reserves a CPU, and on CUDA a GPU. If this process has a private Ray, all workers run on this
machine, and CPUs are not reserved: other groups may use the same ones.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import ray

from rlframework.base.errors import ConfigError
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerSpec
from rlframework.workers import machine
from rlframework.workers.dispatch import DispatchingWorkerGroup
from rlframework.workers.remote_group import check_ranks
from rlframework_ray import runtime
from rlframework_ray.plugin import RayGroupConfig
from rlframework_ray.ray_group import RayWorkerGroup
from rlframework_ray.virtual_cluster import RayVirtualCluster
from rlframework_ray.worker_builder import RayWorkerBuilder

_ADVICE = (
    "Add machines to the cluster, end other programs that use it, lower num_workers of worker_group or "
    "generation.workers, or raise deadlines.start there to wait longer"
)


class ConfiguredRayWorkerGroup(RayWorkerGroup):
    """One worker per rank of `sharding`. Ray itself is started if needed, and shut down with the last group.

    A worker on CUDA sees only its own GPU, as device 0. The ranks of a machine are consecutive.
    """

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        settings = config if isinstance(config, RayGroupConfig) else RayGroupConfig(**config.model_dump())
        check_ranks(sharding, sharding.size)
        python = _python(settings, spec)
        passed = {name: os.environ[name] for name in settings.pass_environment if name in os.environ}
        cluster = _reserve(settings, sharding.size, device, spec)
        try:
            super().__init__(
                cluster,
                RayWorkerBuilder.from_spec(spec),
                sharding_annotations=sharding,
                env_vars=passed | settings.environment,
                runtime_env={} if python is None else {"py_executable": python},
                deadlines=settings.deadlines,
            )
        except BaseException:
            cluster.shutdown()
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
        self.cluster.shutdown()


def _python(settings: RayGroupConfig, spec: WorkerSpec) -> str | None:
    """Return the Python of the workers; None: that of this process."""
    return machine.python_path(settings.python or spec.py_executable)


def _require_python(settings: RayGroupConfig, spec: WorkerSpec) -> None:
    """Raise `ConfigError` unless this machine has the Python of the workers. Ray would wait until its deadline."""
    python = _python(settings, spec)
    if python is not None and shutil.which(python) is None:
        key = "worker_group.python" if settings.python else "generation.workers.python, or py_executable of a plugin,"
        raise ConfigError(f"{key}={python} is not an executable on this machine: set it to the path of a Python")


def _name(spec: WorkerSpec) -> str:
    """The name of the group in messages: with its number, if there are several of its kind."""
    if spec.replicas == 1:
        return "rlframework-workers"
    return f"{spec.target.rpartition(':')[2]} {spec.replica + 1} of {spec.replicas}"


def _reserve(settings: RayGroupConfig, workers: int, device: str, spec: WorkerSpec) -> RayVirtualCluster:
    """Reserve placement groups for all workers: one per node with `workers_per_node`, otherwise a single one.

    Checks a private machine for all replicas of the group.
    """
    private, each = runtime.is_private(settings.address), settings.workers_per_node
    if private:
        each = None
        machine.check_cores(workers * spec.replicas)
        _require_python(settings, spec)
    elif each is not None and workers % each:
        raise ConfigError(
            f"worker_group.num_workers={workers} is not divisible by worker_group.workers_per_node={each}: set it to a "
            "multiple"
        )
    cluster = RayVirtualCluster(
        [workers] if each is None else [each] * (workers // each),
        use_gpus=device == "cuda",
        num_gpus_per_node=each or workers,
        name=_name(spec),
        placement_group_strategy=settings.placement.upper(),
        ready_timeout=settings.deadlines.start,
        cpus_per_worker=0 if private else 1,
        gpus_per_bundle=spec.gpus,
        advice=_ADVICE,
    )
    runtime.acquire(id(cluster), settings.address, settings.listen)
    try:
        if private and device == "cuda":
            machine.check_gpus(workers * spec.replicas * spec.gpus, int(ray.cluster_resources().get("GPU", 0)))  # type: ignore[no-untyped-call]
        cluster._init_placement_groups(use_unified_pg=each is None)
    except BaseException:
        cluster.shutdown()
        raise
    return cluster
