"""The entry point: the record of the worker group `ray`, and its keys. Imports no Ray."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlframework.config.base import NeedsTrust
from rlframework.config.numbers import Workers
from rlframework.config.sections import RemoteGroupConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, WorkerGroupRecord


class RayGroupConfig(RemoteGroupConfig):
    """Workers as Ray actors, on one machine or several."""

    address: Annotated[
        str | None, NeedsTrust("connects to this Ray cluster, whose processes can run code in this one", ("auto",))
    ] = Field(
        None,
        description="address of a running Ray cluster, `host:port` or `auto`; null: RAY_ADDRESS if set, otherwise the "
        "run starts a local Ray instance and stops it at the end",
    )
    workers_per_node: Workers | None = Field(None, description="workers per node of a cluster; null: `placement`")
    placement: Literal["pack", "spread"] = Field(
        "pack", description="without workers_per_node: pack onto as few nodes as possible, or spread over as many"
    )
    listen: Annotated[str, NeedsTrust("lets other machines run code in Ray, which asks no password")] = Field(
        "127.0.0.1",
        description="address on which the local Ray instance of this run listens; the loopback default makes it "
        "unreachable from other machines. On a multi-node cluster, workers listen on their nodes' addresses",
    )
    python: Annotated[str | None, NeedsTrust("starts this program")] = Field(
        None,
        description="Python executable for the workers, present on every node, with the same versions of Python and "
        "Ray; null: the one that the backend names, otherwise that of the cluster or of the driver",
    )


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
