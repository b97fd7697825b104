"""The records of the plugins: name, class and configuration section of each."""

from __future__ import annotations

from rlframework.config.sections import EnvironmentConfig, RemoteGroupConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, DataProcessorRecord, EnvironmentRecord, WorkerGroupRecord


class ReversalConfig(EnvironmentConfig):
    """The words are all those with `length` letters from `letters`; a tenth of them is held out."""

    letters: str = "abcdef"
    length: int = 3


class StopwatchConfig(RemoteGroupConfig):
    """Settings of `processes`, and the duration from which a call counts as slow."""

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
