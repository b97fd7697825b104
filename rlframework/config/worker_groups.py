"""The worker groups: where the workers of a policy run."""

from typing import Annotated, Literal

from pydantic import Field

from rlframework.config.base import NeedsTrust, Section
from rlframework.config.numbers import Seconds, Workers


class DeadlinesConfig(Section):
    """Timeouts of the driver in seconds. A timeout is an error that names what the driver was waiting for."""

    start: Seconds = Field(180.0, description="for workers to start and form their process group")
    call: Seconds = Field(1800.0, description="for one call to all workers, such as a training step")
    shutdown: Seconds = Field(30.0, description="for workers to exit before they are killed")


class WorkerGroupConfig(Section):
    """Where the workers of a policy run."""

    name: str = Field("inline", description="`inline` (the driver's process), `processes`, `ray`, or a plugin's name")
    num_workers: Workers = Field(1, description="number of workers; `inline` supports one")
    deadlines: DeadlinesConfig = DeadlinesConfig()


class RemoteGroupConfig(WorkerGroupConfig):
    """Workers in separate processes. They inherit only the listed environment variables of the driver."""

    environment: Annotated[
        dict[str, str],
        NeedsTrust("sets environment variables of the workers, with which Python loads code (LD_PRELOAD, PYTHONPATH)"),
    ] = Field({}, description="environment variables to set for the workers, by name")
    pass_environment: tuple[str, ...] = Field((), description="environment variables of the driver to pass on, by name")


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
