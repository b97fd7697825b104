"""The keys of `worker_group` for `ray`."""

from typing import Annotated, Literal

from pydantic import Field

from rlframework.config.base import NeedsTrust
from rlframework.config.numbers import Workers
from rlframework.config.sections import RemoteGroupConfig


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
