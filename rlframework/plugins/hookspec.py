"""The hooks that a plugin can implement, and the markers `hookspec` and `hookimpl`.

Six registration hooks return records, one hook an interface; core picks among the records by name. Four observer hooks
only listen. There is no hook that changes behaviour: exactly one engine is active, and its name says which.

An implementation takes the arguments of its specification by the same names (it may leave some out), and gives none of
them a default value. It must be light: it runs for `rlframework plugins`, where torch is never imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pluggy

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.plugins.types import (
        AlgorithmRecord,
        DataProcessorRecord,
        EnvironmentRecord,
        GenerationEngineRecord,
        PolicyWorkerRecord,
        WorkerGroupRecord,
    )

PROJECT = "rlframework"
"""Name of the pluggy project, and of the entry-point group that is searched for plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class RunInfo:
    """The run that an observer hook is told about: its resolved configuration and the directory that it writes to."""

    config: RunConfig
    output_dir: Path


@dataclass(frozen=True)
class SampleRecord:
    """One completion of a step as text, with what it was worth."""

    prompt: str
    completion: str
    reward: float
    step: int
    kind: Literal["train", "validation"] = "train"


# Registration hooks. Each specification returns nothing: pluggy never calls it.


@hookspec
def rlframework_policy_workers() -> Iterable[PolicyWorkerRecord]:
    """Training engines: the words for `policy.backend`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import Capability, PolicyWorkerRecord
    >>> @hookimpl
    ... def rlframework_policy_workers():
    ...     return [
    ...         PolicyWorkerRecord(
    ...             name="mine",
    ...             target="my_package.worker:MyPolicyWorker",
    ...             api_version=1,
    ...             capabilities=frozenset({Capability.DATA_PARALLEL}),
    ...         )
    ...     ]
    """
    return ()


@hookspec
def rlframework_data_processors() -> Iterable[DataProcessorRecord]:
    """Ways to cut global batches and make microbatches.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import DataProcessorRecord
    >>> @hookimpl
    ... def rlframework_data_processors():
    ...     return [DataProcessorRecord(name="mine", target="my_package.data:MyProcessor", api_version=1)]
    """
    return ()


@hookspec
def rlframework_worker_groups() -> Iterable[WorkerGroupRecord]:
    """Ways to run N workers: the words for `worker_group.name`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import WorkerGroupRecord
    >>> @hookimpl
    ... def rlframework_worker_groups():
    ...     return [WorkerGroupRecord(name="mine", target="my_package.group:MyWorkerGroup", api_version=1)]
    """
    return ()


@hookspec
def rlframework_generation_engines() -> Iterable[GenerationEngineRecord]:
    """Engines that complete prompts: the words for `generation.name`.

    >>> from rlframework.config.sections import GenerationConfig
    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import GenerationEngineRecord
    >>> class MyConfig(GenerationConfig):
    ...     beams: int = 1
    >>> @hookimpl
    ... def rlframework_generation_engines():
    ...     return [
    ...         GenerationEngineRecord(
    ...             name="mine", target="my_package.engine:MyEngine", api_version=1, config_model=MyConfig
    ...         )
    ...     ]
    """
    return ()


@hookspec
def rlframework_environments() -> Iterable[EnvironmentRecord]:
    """Tasks with a reward: the words for `environment.name`.

    >>> from rlframework.config.sections import EnvironmentConfig
    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import EnvironmentRecord
    >>> class MazeConfig(EnvironmentConfig):
    ...     width: int = 8
    >>> @hookimpl
    ... def rlframework_environments():
    ...     return [
    ...         EnvironmentRecord(name="maze", target="my_package.maze:Maze", api_version=1, config_model=MazeConfig)
    ...     ]
    """
    return ()


@hookspec
def rlframework_algorithms() -> Iterable[AlgorithmRecord]:
    """What a run does with its parts: the words for `algorithm.name`.

    >>> from rlframework.config.sections import AlgorithmConfig
    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import AlgorithmRecord
    >>> class MyConfig(AlgorithmConfig):
    ...     beta: float = 0.1
    >>> @hookimpl
    ... def rlframework_algorithms():
    ...     return [
    ...         AlgorithmRecord(
    ...             name="mine", target="my_package.algorithm:MyAlgorithm", api_version=1, config_model=MyConfig
    ...         )
    ...     ]
    """
    return ()


# Observer hooks. They run in the driver, and what they return is not used.


@hookspec
def rlframework_run_started(run: RunInfo) -> None:
    """The parts are built and the first step is about to begin.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_run_started(run):
    ...     print("writing to", run.output_dir)
    """


@hookspec
def rlframework_step_finished(
    run: RunInfo, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]
) -> None:
    """A step is done. `metrics` are numbers by name; `samples` are some of the step's completions with their rewards.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_step_finished(step, metrics):
    ...     print(step, sorted(metrics))
    """


@hookspec
def rlframework_checkpoint_saved(run: RunInfo, step: int, path: Path) -> None:
    """A checkpoint is complete and lies at `path`, a directory.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_checkpoint_saved(step, path):
    ...     print("step", step, "is in", path)
    """


@hookspec
def rlframework_run_finished(run: RunInfo, metrics: Mapping[str, float]) -> None:
    """The run came to its end; `metrics` are the last ones. A run that failed does not get here.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_run_finished(run, metrics):
    ...     print("done:", run.output_dir, sorted(metrics))
    """
