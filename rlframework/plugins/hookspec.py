"""The hooks that a plugin can implement, and the markers `hookspec` and `hookimpl`.

Six registration hooks return records, one hook per interface; the configuration selects records by name. Four observer
hooks are notified of events. No hook changes behavior: exactly one engine is active, the one that is selected by name.

An implementation takes the arguments of its specification under the same names, without default values; it may omit
some. It must be lightweight, because it also runs for `rlframework plugins`, which never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pluggy

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
"""Name of the pluggy project and of the entry-point group of plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class RunInfo:
    """The run that an observer hook is called for: its resolved configuration and its output directory."""

    config: RunConfig
    output_dir: Path


@dataclass(frozen=True)
class SampleRecord:
    """One completion of a step as text, with its reward.

    Of an episode, `completion` is the model's last turn, and `turns` are all messages: mappings as
    `rlframework.interfaces.messages.Message`, with `trained` (whether its tokens are in the loss) and, for the model's
    turns, `sampled`, the `reward` that followed, and `row`, the number of their training row, from the second row on.
    `failure`: why the episode failed, so that it is not trained on.
    `images`: those of the prompt, each an `rlframework.interfaces.pictures.Picture`. `sample`: the id of its
    `rlframework.interfaces.environment.Sample`. `metrics`: what its reward consists of, by name, without weights.
    `truncated`: whether a limit cut the answer or the episode. `model_input`: the text that the answer or the first
    turn continues, as the chat template writes it, also of tools. `model_output`: the text of the completion's tokens
    with special ones, only where `completion` leaves out more than the token that ended it.
    """

    prompt: str
    completion: str
    reward: float
    step: int
    kind: Literal["train", "validation"] = "train"
    turns: Sequence[Mapping[str, Any]] = ()
    failure: str = ""
    images: Sequence[Any] = ()
    sample: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    model_input: str = ""
    model_output: str = ""


class TimeSpan(NamedTuple):
    """An activity of a part of the run from `start` to `end`, in seconds since 1970.

    `lane`: the part: `trainer`, `engine 0`, `engine 1`, ..., `refits` or `environment`. `activity`: what it did, such
    as `train`.
    """

    lane: str
    activity: str
    start: float
    end: float


# Registration hooks. Each specification returns nothing: pluggy never calls it.


@hookspec
def rlframework_policy_workers() -> Iterable[PolicyWorkerRecord]:
    """Return training backends, selected by `policy.backend`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import Capability, PolicyWorkerRecord
    >>> @hookimpl
    ... def rlframework_policy_workers():
    ...     capabilities = frozenset({Capability.DATA_PARALLEL})
    ...     return [PolicyWorkerRecord("mine", "my_package.worker:MyWorker", api_version=1, capabilities=capabilities)]
    """
    return ()


@hookspec
def rlframework_data_processors() -> Iterable[DataProcessorRecord]:
    """Return data processors, which split global batches into microbatches, selected by `policy.data_processor`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import DataProcessorRecord
    >>> @hookimpl
    ... def rlframework_data_processors():
    ...     return [DataProcessorRecord(name="mine", target="my_package.data:MyProcessor", api_version=1)]
    """
    return ()


@hookspec
def rlframework_worker_groups() -> Iterable[WorkerGroupRecord]:
    """Return worker groups, selected by `worker_group.name`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import WorkerGroupRecord
    >>> @hookimpl
    ... def rlframework_worker_groups():
    ...     return [WorkerGroupRecord(name="mine", target="my_package.group:MyWorkerGroup", api_version=1)]
    """
    return ()


@hookspec
def rlframework_generation_engines() -> Iterable[GenerationEngineRecord]:
    """Return generation engines, selected by `generation.name`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import GenerationEngineRecord
    >>> @hookimpl
    ... def rlframework_generation_engines():
    ...     return [GenerationEngineRecord("mine", "my_package.engine:MyEngine", api_version=2)]
    """
    return ()


@hookspec
def rlframework_environments() -> Iterable[EnvironmentRecord]:
    """Return environments (tasks with a reward), selected by `environment.name`.

    >>> from rlframework.config.sections import EnvironmentConfig
    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import EnvironmentRecord
    >>> class MazeConfig(EnvironmentConfig):
    ...     width: int = 8
    >>> @hookimpl
    ... def rlframework_environments():
    ...     return [EnvironmentRecord("maze", "my_package.maze:Maze", api_version=1, config_model=MazeConfig)]
    """
    return ()


@hookspec
def rlframework_algorithms() -> Iterable[AlgorithmRecord]:
    """Return algorithms, selected by `algorithm.name`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> from rlframework.plugins.types import AlgorithmRecord
    >>> @hookimpl
    ... def rlframework_algorithms():
    ...     return [AlgorithmRecord("mine", "my_package.algorithm:MyAlgorithm", api_version=1)]
    """
    return ()


# Observer hooks. They run in the driver, and their return values are ignored.


@hookspec
def rlframework_run_started(run: RunInfo) -> None:
    """Called once everything is built, before the first step.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_run_started(run):
    ...     print("writing to", run.output_dir)
    """


@hookspec
def rlframework_step_finished(
    run: RunInfo,
    step: int,
    metrics: Mapping[str, float],
    samples: Sequence[SampleRecord],
    timeline: Sequence[TimeSpan],
) -> None:
    """Called after each step. `metrics` are values by name; `samples` are some completions with their rewards.

    `timeline`: when trainer, engines, refits and environment were busy since the last call.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_step_finished(step, metrics):
    ...     print(step, sorted(metrics))
    """


@hookspec
def rlframework_checkpoint_saved(run: RunInfo, step: int, path: Path) -> None:
    """Called when a checkpoint is complete in the directory `path`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_checkpoint_saved(step, path):
    ...     print("step", step, "is in", path)
    """


@hookspec
def rlframework_run_finished(run: RunInfo, metrics: Mapping[str, float]) -> None:
    """Called at the end of a run, unless it failed; `metrics` are the last ones.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_run_finished(run, metrics):
    ...     print("done:", run.output_dir, sorted(metrics))
    """
