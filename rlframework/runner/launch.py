"""Start, resume or plan runs, and evaluate models.

    config = load_config("grpo.yaml", ["seed=1"])
    result = run(config)

To use the parts yourself:

    with build_parts(config) as parts:
        parts.policy.train(batch, loss)
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rlframework.algorithm import Parts, RunResult
from rlframework.configure import config_yaml, load_config
from rlframework.errors import ConfigError, RunTerminated
from rlframework.files import exclusive_directory, write_atomically
from rlframework.logs import log_to_stderr
from rlframework.plugins.manager import create_manager
from rlframework.runner.parts import algorithm_class, build_evaluation, build_parts, planned_parts, require_models

if TYPE_CHECKING:
    from rlframework.config.sections import RunConfig
    from rlframework.evaluation.plan import EvaluationPlan
    from rlframework.evaluation.report import Evaluation
    from rlframework.logs import ProgressCallback
    from rlframework.plugins.manager import PluginManager
    from rlframework.runner.estimate import Estimate
    from rlframework.runner.restarts import Attempt


def run(
    config: RunConfig,
    *,
    manager: PluginManager | None = None,
    checkpoint: Path | None = None,
    overwrite: bool = False,
) -> RunResult:
    """Train as `config` describes and save the trained model in `config.output_dir / "model"`.

    Invalid input raises a `UserError` before `output_dir` is created or changed. An `output_dir` that holds a run is an
    error, unless that run is resumed from `checkpoint` (see `resume`) or replaced (`overwrite`); one that failed before
    the end of its first step is always replaced. Files that no run wrote are never deleted. A run that loses a worker
    restarts as `config.fault_tolerance` allows; the result's `history` is then that of the last attempt.
    """
    from rlframework.observers.services import check_services
    from rlframework.runner.output_folder import check_output_dir

    log_to_stderr()
    check_services(config.observers)
    if checkpoint is None:
        check_output_dir(config, overwrite)
    require_models(config)
    from rlframework.runner.restarts import Restarts
    from rlframework.training.checkpoints import handling

    manager = manager or create_manager(config.plugins)
    # SIGTERM raises, so that workers and observers shut down; the training loop has its own handler
    with handling(_terminate, signal.SIGTERM), ExitStack() as lock:
        return Restarts(config, checkpoint).run(lambda attempt: _train(config, manager, attempt, lock, overwrite))


def _train(config: RunConfig, manager: PluginManager, attempt: Attempt, lock: ExitStack, overwrite: bool) -> RunResult:
    """Make one attempt at the run. The first attempt locks the run's folder until `lock` is closed."""
    from rlframework.observers.environment import write_environment
    from rlframework.runner.estimate import print_estimate
    from rlframework.runner.output_folder import check_output_dir, clear, read_contents

    algorithm, folder = algorithm_class(config, manager), config.output_dir
    first = attempt.number == 0
    starts = first and attempt.checkpoint is None
    locked = False

    def before_workers(parts: Parts) -> None:
        nonlocal locked
        print_estimate(parts, algorithm.needs_reference_model(config.algorithm))
        if starts and read_contents(folder).deletable:
            algorithm(parts)  # makes the last checks of the input before anything is deleted
            lock.enter_context(exclusive_directory(folder))
            locked = True
            check_output_dir(config, overwrite)
            clear(folder)

    planning = before_workers if first else None
    with build_parts(config, manager=manager, checkpoint=attempt.checkpoint, planning=planning) as parts:
        training = algorithm(parts)
        if first:
            if not locked:
                lock.enter_context(exclusive_directory(folder))
            if starts:
                check_output_dir(config)  # again, because another process may have trained in the folder since
            write_atomically(folder / "config.yaml", config_yaml(config))
        write_environment(folder, manager.listing())  # before observers read the run's id from it
        with parts.observers:
            attempt.observers = parts.observers
            result = training.run()
            path = folder / "model"
            parts.policy.save_pretrained(str(path))
            if config.policy.lora is not None:
                parts.policy.save_adapter(str(folder / "adapter"))
            parts.observers.checkpoint_saved(int(result.metrics["step"]), path)
            parts.observers.run_finished(result.metrics)
    return result


def _terminate(number: int, frame: FrameType | None) -> None:
    raise RunTerminated("terminated")


def resume(run_dir: str | Path, overrides: Sequence[str] = ()) -> RunResult:
    """Resume the run in `run_dir` from its newest checkpoint; the numbers equal those of an uninterrupted run.

    `overrides` change its configuration, for example `algorithm.num_steps=200`. Raises `ConfigError` if the folder has
    no run or no checkpoint.
    """
    from rlframework.training.checkpoints import newest_checkpoint

    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run to resume: it has no config.yaml. Give a run's output_dir")
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise ConfigError(
            f"{str(run_dir)!r} has no checkpoint to resume from: the run ended before it wrote one. Start it again "
            "with --overwrite or in another output_dir; checkpoints.every=N writes one every N steps"
        )
    return run(load_config(path, [*overrides, f"output_dir={run_dir}"]), checkpoint=checkpoint)


def dry_run(config: RunConfig, *, overwrite: bool = False) -> Estimate:
    """Make every check that `run` makes before it starts workers, and estimate what the run needs. Writes nothing.

    An `output_dir` in which `run` would not start (with this `overwrite`) is a warning of the estimate, not an error.
    """
    require_models(config)
    from rlframework.observers.services import check_services
    from rlframework.runner.estimate import estimate
    from rlframework.runner.output_folder import check_output_dir

    check_services(config.observers)
    manager = create_manager(config.plugins)
    with planned_parts(config, manager) as parts:
        algorithm = algorithm_class(config, manager)
        algorithm(parts)
        found = estimate(parts, algorithm.needs_reference_model(config.algorithm))
    try:
        check_output_dir(config, overwrite)
    except ConfigError as error:
        return replace(found, output_dir_problem=str(error))
    return found


def evaluate(
    plan: EvaluationPlan, progress: Callable[[str], AbstractContextManager[ProgressCallback]]
) -> tuple[list[Evaluation], dict[str, Any]]:
    """Evaluate each model of `plan` in turn and write its summary.

    `progress(name)` opens a progress display for a model; its context yields a callable that takes the number of
    finished completions and the total. Returns the evaluations, and as JSON values the summary of one model, or the
    summaries of several and their comparison.
    """
    from rlframework.evaluation.evaluate import evaluate as run_evaluation
    from rlframework.evaluation.report import comparison, summary

    results: list[Evaluation] = []
    summaries: list[dict[str, Any]] = []
    for number, (source, config) in enumerate(zip(plan.models, plan.configs, strict=True)):
        out = plan.folder(number)
        with progress(source.name) as report, build_evaluation(config) as parts:
            results.append(run_evaluation(parts, plan, out, progress=report))
            summaries.append(summary(source, parts, plan, results[-1]))
        _write_json(out / "summary.json", summaries[-1])
    if len(results) == 1:
        return results, summaries[0]
    compared = comparison(plan.models, results)
    _write_json(plan.out / "comparison.json", compared)
    return results, {"evaluations": summaries, "comparison": compared}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, allow_nan=False) + "\n")
