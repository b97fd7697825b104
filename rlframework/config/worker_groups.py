"""The worker groups: where the workers of a policy run."""

from typing import Annotated

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
