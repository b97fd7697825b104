"""The records: what each part is called, where it is, and the section of the configuration that it has."""

from __future__ import annotations

from rlframework.config.sections import EnvironmentConfig, HostedGroupConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, DataProcessorRecord, EnvironmentRecord, WorkerGroupRecord


class ReversalConfig(EnvironmentConfig):
    """Which words are asked for: all of `length` letters out of `letters`, a tenth of them held out."""

    letters: str = "abcdef"
    length: int = 3


class StopwatchConfig(HostedGroupConfig):
    """Processes of this machine, and when a call of them is slow."""

    slow_seconds: float = 10.0


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """`environment.name: reversal`."""
    target = "rlframework_examples.reversal:Reversal"
    return [EnvironmentRecord(name="reversal", target=target, api_version=1, config_model=ReversalConfig)]


@hookimpl
def rlframework_data_processors() -> list[DataProcessorRecord]:
    """`policy.data_processor: longest_first`."""
    target = "rlframework_examples.longest_first:LongestFirst"
    return [DataProcessorRecord(name="longest_first", target=target, api_version=1)]


@hookimpl
def rlframework_worker_groups() -> list[WorkerGroupRecord]:
    """`worker_group.name: stopwatch`."""
    return [
        WorkerGroupRecord(
            name="stopwatch",
            target="rlframework_examples.stopwatch:StopwatchGroup",
            api_version=1,
            capabilities=frozenset({Capability.DATA_PARALLEL}),  # more than one worker
            config_model=StopwatchConfig,
        )
    ]
