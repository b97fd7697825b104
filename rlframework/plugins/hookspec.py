"""The hooks that a plugin can implement, and the markers `hookspec` and `hookimpl`.

Six hooks are a registry: they return records, one hook per interface, and the configuration selects records by name.
The others act: they add commands, or are notified of events of a run. Of several plugins, those with
`@hookimpl(tryfirst=True)` are called first and those with `trylast=True` last. A plugin whose hook raises is named; the
docstring of each hook says whether the run goes on without it. One that takes more than 5 seconds is named in the log.

An implementation takes the arguments of its specification under the same names, without default values; it may omit
some. It must be lightweight, because it also runs for `rlframework plugins`, which never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import pluggy
import typer
from pydantic import BaseModel

from rlframework.config.sections import GenerationConfig, ObserversConfig, RunConfig
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
    `images`: those of the prompt, each an `rlframework.interfaces.messages.Picture`. `sample`: the id of its
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


@dataclass(frozen=True)
class DoctorFinding:
    """One result of a check of `rlframework doctor`: a description, what to do about it, and the facts as JSON values.

    `level`: `broken` makes the exit code 1; `unknown`: the check itself failed.
    """

    level: Literal["ok", "note", "unknown", "warning", "broken"]
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DoctorCheck:
    """A check of `rlframework doctor`, shown under `topic` and `name`; those of the topic "run" need a configuration.

    `function(config)` gets the configuration that the doctor was given and could load, or None. It runs beside other
    checks, in a thread; an exception of it is a finding.
    """

    topic: str
    name: str
    function: Callable[[RunConfig | None], Iterable[DoctorFinding]]


class Uploads(Protocol):
    """Sends the checkpoints of a run elsewhere. All methods are called by the driver and return at once."""

    def add(self, path: Path, score: float | None = None) -> None:
        """Upload the checkpoint in the folder `path`. `score`: the metric by which the best checkpoints are kept."""
        ...

    def in_use(self) -> set[Path]:
        """Return the checkpoints whose files must stay: those that are being uploaded or wait for it."""
        ...

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the metrics of uploads that have ended since the last call."""
        ...

    def finishing(self) -> AbstractContextManager[None]:
        """Return the context that the run trains in: its exit waits for the last upload, and raises if that failed.

        After an error of the run it waits, too, and that error is the one that is raised.
        """
        ...


# The registry. Each specification returns nothing: pluggy never calls it.


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


# Hooks that act.


@hookspec
def rlframework_commands(app: typer.Typer) -> None:
    """Add commands to the command line. Called when the command or a list of commands is asked for.

    `rlframework.cli.common` has the options that commands share. A command whose name another plugin uses, too, can
    be used by neither. Import what is heavy inside the command. After an exception the commands of the plugin are
    missing, with a warning.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_commands(app):
    ...     @app.command()
    ...     def hello(name: str) -> None:
    ...         print("hello", name)
    """


@hookspec(firstresult=True)
def rlframework_agent_endpoint() -> str | None:
    """Return the import path `module:function` of an endpoint for agents; the first plugin that has one is used.

    An exception, or a path that cannot be imported, ends the run.

    `function(parts, bridge)` returns an asynchronous context with a `rlframework.rollout.episodes.AgentRunner`, which
    attempts tasks against an endpoint that samples on `bridge`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_agent_endpoint():
    ...     return "my_package.endpoint:agent_runner"
    """


@hookspec(firstresult=True)
def rlframework_key_hint(path: tuple[str, ...], value: object, model: type[BaseModel] | None) -> str | None:
    """Return what the key `path` of another library is called here; None if it is no such key.

    `model` is the configuration in which the key is unknown, None if that cannot be built.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_key_hint(path):
    ...     return "In rlframework this is `policy.optimizer.lr`." if path[-1] == "learning_rate" else None
    """


@hookspec(firstresult=True)
def rlframework_value_hint(key: str, value: object) -> str | None:
    """Return what the value of another library is for our `key`; None if it is no such value.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_value_hint(key, value):
    ...     return "fsdp2 is dtensor." if (key, value) == ("policy.backend", "fsdp2") else None
    """


@hookspec(firstresult=True)
def rlframework_configuration_hint(
    unknown: Mapping[tuple[str, ...], object],
    hints: Sequence[str],
    algorithm: Mapping[str, object],
    model: type[BaseModel] | None,
) -> str | None:
    """Return a note on the `unknown` keys of a configuration, with their values, as a whole; None without one.

    `hints` are those on single keys. `algorithm` has the keys of the section of that name, whose model is `model`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_configuration_hint(unknown):
    ...     return "See docs/moving/trl.md." if ("num_generations",) in unknown else None
    """


@hookspec
def rlframework_run_planned(parts: Any, backend: PolicyWorkerRecord, dry_run: bool) -> None:
    """Called when a run is checked and planned, before its workers start. `dry_run`: they will not.

    `parts` is a `rlframework.rollout.parts.Parts` whose policy and generation are not started; `backend` is the record
    of the training backend. A `UserError` prevents the run, any other error is a warning.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_run_planned(parts, dry_run):
    ...     print("rows of a step:", parts.config.policy.train_global_batch_size, "dry run:", dry_run)
    """


@hookspec(firstresult=True)
def rlframework_plan_elsewhere(config: str, overrides: Sequence[str], on: str, overwrite: bool) -> bool | None:
    """Print what a run needs on the GPUs `on`, such as `8xH100`, and return whether it fits (`train --dry-run --on`).

    An exception ends the command.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_plan_elsewhere(config, on):
    ...     print(config, "fits on", on)
    ...     return True
    """


@hookspec(firstresult=True)
def rlframework_state_layout(config: RunConfig, worker: Any) -> Any:
    """Return what the backend `config.policy.backend` keeps in memory on `worker`, for estimates; None: another's.

    `worker` is a `PlannedWorker` and the result a `StateLayout` of `rlframework_tools.estimates.state_layout`, which
    asks for it. Without an answer, and after an exception, with a warning, FSDP is assumed.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_state_layout(config, worker):
    ...     if config.policy.backend == "mine":
    ...         from my_package.memory import state_layout
    ...
    ...         return state_layout(config, worker)
    """


@hookspec(firstresult=True)
def rlframework_weights_are_staged(generation: GenerationConfig) -> bool | None:
    """Return whether each GPU of an engine holds its weights twice during an update, for estimates; None: another's.

    Without an answer, and after an exception, with a warning, it does not.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_weights_are_staged(generation):
    ...     return True if generation.name == "mine" else None
    """


@hookspec
def rlframework_doctor_checks() -> Iterable[DoctorCheck]:
    """Return checks for `rlframework doctor`. After an exception the plugin has none, and the doctor says so.

    >>> from pathlib import Path
    >>> from rlframework.plugins.hookspec import DoctorCheck, DoctorFinding, hookimpl
    >>> def licence(config):
    ...     if Path("/etc/acme.licence").is_file():
    ...         yield DoctorFinding("ok", "the licence is there")
    ...     else:
    ...         yield DoctorFinding("broken", "there is no licence", "Copy it to /etc/acme.licence")
    >>> @hookimpl
    ... def rlframework_doctor_checks():
    ...     return [DoctorCheck("machine", "licence of acme", licence)]
    """
    return ()


@hookspec(firstresult=True)
def rlframework_resume_from(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """Return the folder of the checkpoint from which a run continues, or None. Called if `checkpoints.upload` is set.

    `checkpoint` is the one that the user named, if any; it takes precedence. Called before anything of the run is
    built, so it also raises a `ConfigError` if the run could not use `checkpoints.upload`. Any exception prevents the
    run.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_resume_from(config, checkpoint):
    ...     return checkpoint
    """


@hookspec(firstresult=True)
def rlframework_uploads(config: RunConfig) -> Uploads | None:
    """Return what sends the checkpoints of a run to `checkpoints.upload`, or None. An exception prevents the run.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_uploads(config):
    ...     return None
    """


@hookspec(firstresult=True)
def rlframework_teacher_endpoint() -> str | None:
    """Return the import path `module:Class` of a teacher behind an endpoint; the first plugin that has one is used.

    `Class(config, tokenizer, temperature)` is a `rlframework.algorithms.teacher_targets.Scorer`; `config` is the
    section `algorithm.endpoint`.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_teacher_endpoint():
    ...     return "my_package.teacher:TeacherAtMyService"
    """


@hookspec(firstresult=True)
def rlframework_judge() -> str | None:
    """Return the import path `module:Class` of a model that scores; the first installed plugin that has one is used.

    `Class(config, judge, name, key)` is a `rlframework.environments.weighted_rewards.Reward`; `judge` is the section
    `environment.reward.NAME.judge`, `key` that key, `name` its NAME, and `config` the section `environment`. An
    exception, or a path that cannot be imported, prevents the run.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_judge():
    ...     return "my_package.judge:JudgeAtMyService"
    """


@hookspec
def rlframework_observers() -> Mapping[str, str]:
    """Return import paths `module:Class` of observers, by their keys in the section `observers`.

    An observer is constructed without arguments if its key is set. Besides observer hooks, it may have
    `close(state)`, which is called once no matter how the run ended: "finished", "failed" or "killed". After an
    exception of this hook, a warning, its observers are missing, and a run that asks for one by a section does not
    start.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_observers():
    ...     return {"tensorboard": "my_package.tensorboard:MyObserver"}
    """
    return {}


@hookspec
def rlframework_observer_problems(config: ObserversConfig) -> Iterable[str]:
    """Return why observers that the section `observers` asks for cannot be used; each prevents the run.

    A `UserError` prevents it, too; any other exception is a warning.

    >>> from rlframework.plugins.hookspec import hookimpl
    >>> @hookimpl
    ... def rlframework_observer_problems(config):
    ...     return ["observers.wandb is set, but wandb is not installed"] if config.wandb else []
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
