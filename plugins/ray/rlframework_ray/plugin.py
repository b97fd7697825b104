"""The entry point: the record of the worker group `ray`. Imports no Ray."""

from __future__ import annotations

from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, WorkerGroupRecord
from rlframework_ray.config import RayGroupConfig


@hookimpl
def rlframework_worker_groups() -> list[WorkerGroupRecord]:
    """Return the record selected by `worker_group.name: ray`."""
    return [
        WorkerGroupRecord(
            "ray",
            "rlframework_ray.configured_group:ConfiguredRayWorkerGroup",
            api_version=1,
            summary="Ray actors on this machine or on a cluster",
            capabilities=frozenset({Capability.DATA_PARALLEL}),
            config_model=RayGroupConfig,
        )
    ]
