"""Start, resume or plan runs, and evaluate models.

    config = load_config("grpo.yaml", ["seed=1"])
    result = run(config)

To use the parts yourself:

    with build_parts(config) as parts:
        parts.policy.train(batch, loss)
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.algorithms.algorithm import RunResult
from rlframework.algorithms.ending import ending_on_signals, raise_if_ended
from rlframework.base.errors import ConfigError, PluginError
from rlframework.base.files import exclusive_directory, remove_temporary, write_atomically
from rlframework.base.logs import log_to_stderr
from rlframework.base.secrets import has_secrets, hide_secrets
from rlframework.config.sections import RunConfig
from rlframework.config.trust import require_own_files
from rlframework.config.validate import notes_on
from rlframework.config.yaml_text import parse_yaml, read_yaml
from rlframework.observers.jsonl import METRICS_FILE, drop_steps_after, read_history
from rlframework.observers.run_environment import flatten
from rlframework.plugins.configure import config_yaml, dump_config, load_config
from rlframework.plugins.hook_calls import Hook
from rlframework.plugins.manager import PluginManager, create_manager
from rlframework.rollout.parts import Parts
from rlframework.runner.data import require_data, with_data
from rlframework.runner.parts import (
    algorithm_class,
    backend_record,
    build_parts,
    planned_parts,
    require_models,
)
from rlframework.runner.restarts import Attempt, run_with_restarts

if TYPE_CHECKING:
    from rlframework.config.load import Source
    from rlframework.datasets.sources.memory import Data
    from rlframework.observers.run_environment import Resumed
    from rlframework.plugins.hookspec import Uploads

_LOG = logging.getLogger(__name__)


def run(
    config: Source,
    *,
    data: Data | None = None,
    manager: PluginManager | None = None,
    checkpoint: Path | None = None,
    overwrite: bool = False,
) -> RunResult:
    """Train as `config` describes and save the trained model in `config.output_dir / "model"`.

    `config`: the result of `load_config`, or what that takes.
    Invalid input raises a `UserError` before `output_dir` is created or changed. An `output_dir` that holds a run is an
    error, unless that run is resumed from `checkpoint` (see `resume`) or replaced (`overwrite`); one that failed before
    the end of its first step is always replaced. Files that no run wrote are never deleted. A run that loses a worker
    restarts as `config.fault_tolerance` allows; the result's `history` is then that of the last attempt. `data`: rows
    to train on, see `rlframework.with_data`.
    """
    from rlframework.observers.dispatch import require_observers
    from rlframework.runner.output_folder import check_output_dir

    log_to_stderr()
    config = config if isinstance(config, RunConfig) else load_config(config, manager=manager)
    config = config if data is None else with_data(config, data)
    require_data(config)
    manager = manager or create_manager(config.plugins)
    manager.warn_of_broken()
    require_observers(config.observers, manager)
    checkpoint = _checkpoint(config, manager, checkpoint, overwrite)
    if checkpoint is None:
        check_output_dir(config, overwrite)
    require_models(config)
    for note in notes_on(config):
        _LOG.info("%s", note)
    # signals raise, so that workers and observers shut down; the training loop has its own handler
    with ending_on_signals(), ExitStack() as stack:
        lock = cache(lambda: stack.enter_context(exclusive_directory(config.output_dir)))
        return run_with_restarts(
            config, lambda attempt: _train(config, manager, attempt, lock, overwrite), checkpoint=checkpoint
        )


def _checkpoint(config: RunConfig, manager: PluginManager, given: Path | None, overwrite: bool) -> Path | None:
    """The checkpoint to resume from: the `given` one, else one that a plugin has found, as for `resume_uploaded`."""
    if config.checkpoints.upload is None:
        return given
    if given is None and config.checkpoints.resume_uploaded and overwrite:
        raise ConfigError("checkpoints.resume_uploaded continues a run and --overwrite deletes it; give one of them")
    if not manager.implements("rlframework_uploads"):
        raise PluginError(
            f"checkpoints.upload needs a plugin that uploads: {manager.how_to_get('rlframework_uploads')}"
        )

    def resume_from(hook: Hook) -> Path | None:
        folder = hook(config=config, checkpoint=given)
        return None if folder is None else Path(folder)

    found = manager.call_first("rlframework_resume_from", resume_from)
    return found if given is None else given


def _train(
    config: RunConfig, manager: PluginManager, attempt: Attempt, lock: Callable[[], None], overwrite: bool
) -> RunResult:
    """Make one attempt at the run. `lock` locks the run's folder until the end of all attempts, when first called."""
    from rlframework.algorithms.checkpoints import seed_random_states, step_of_checkpoint  # imports torch
    from rlframework.observers.run_environment import write_environment
    from rlframework.runner.output_folder import check_output_dir, clear, read_contents

    algorithm, folder = algorithm_class(config, manager), config.output_dir
    first = attempt.number == 0
    starts = first and attempt.checkpoint is None

    def before_workers(parts: Parts) -> None:
        run_planned(parts, manager, dry_run=False)
        if starts and read_contents(folder).deletable:
            algorithm(parts)  # makes the last checks of the input before anything is deleted
            lock()
            check_output_dir(config, overwrite)
            clear(folder)

    if attempt.checkpoint is None:
        seed_random_states(config.seed)  # for environments and losses that draw from global generators
    planning = before_workers if first else None
    uploads: Uploads | None = manager.call_first("rlframework_uploads", lambda hook: hook(config=config))
    with (
        nullcontext() if uploads is None else uploads.finishing(),
        build_parts(config, manager=manager, checkpoint=attempt.checkpoint, planning=planning) as parts,
    ):
        raise_if_ended()
        parts.uploads = uploads
        training = algorithm(parts)
        if first:
            lock()
            remove_temporary(folder)
            if attempt.checkpoint is None:
                check_output_dir(config)  # again, because another process may have trained in the folder since
        attempt.observers = parts.observers
        training.restore()  # before a file of the run is changed: it may be rejected
        if first and attempt.checkpoint is not None:
            drop_steps_after(folder, step_of_checkpoint(attempt.checkpoint))
        resumed = None if attempt.checkpoint is None else _resumed(config, step_of_checkpoint(attempt.checkpoint))
        if resumed is not None:
            _note_schedules(parts, resumed)
        if first:  # it has the secrets that the configuration spells out, which a resumed run needs
            write_atomically(folder / "config.yaml", config_yaml(config), private=has_secrets(dump_config(config)))
        # before observers read the run's id from it
        write_environment(folder, manager.listing(), resumed=resumed)
        with parts.observers:
            raise_if_ended()
            result = training.run()
            raise_if_ended()
            _save_models(parts, folder)
            parts.observers.checkpoint_saved(int(result.metrics["step"]), folder / "model")
            parts.observers.run_finished(result.metrics)
    _note_best(config)
    return result


def _save_models(parts: Parts, folder: Path) -> None:
    """Write the trained models into the run's folder, and the adapters if there are any."""
    parts.policy.save_pretrained(str(folder / "model"), replace=True)
    if parts.config.policy.lora is not None:
        parts.policy.save_adapter(str(folder / "adapter"), replace=True)
    for name, trained in parts.trained.items():
        trained.save_pretrained(str(folder / name), replace=True)


def _note_best(config: RunConfig) -> None:
    """Log which of the kept checkpoints of a finished run is the best, and how to get its model."""
    from rlframework.algorithms.checkpoints import best_checkpoint, has_measured

    section = config.checkpoints
    if not (section.every and section.keep_best):
        return
    found = best_checkpoint(config.output_dir, section)
    if found is None:
        every = "let checkpoints.every be a multiple of algorithm.validation.every, or "
        _LOG.warning(
            "checkpoints.keep_best=%d kept no checkpoint: none is of a step that has the metric checkpoints.metric=%r; "
            "%sname another metric",
            section.keep_best,
            section.metric,
            every if has_measured(config.output_dir, section.metric) else "no step of this run had it: ",
        )
        return
    path, value, equal = found
    tie = f", the last of {equal} that are equal: another checkpoints.metric may tell them apart" if equal > 1 else ""
    which = f"{section.best}{tie}"
    command = f"rlframework convert {shlex.quote(str(path))} DEST --to huggingface"
    _LOG.info("best checkpoint: %s, with %s %.4g (%s); its model: %s", path, section.metric, value, which, command)


def _resumed(config: RunConfig, step: int) -> Resumed:
    """Return the step and the settings that a resume changes."""
    from rlframework.observers.run_environment import Resumed

    file = config.output_dir / "config.yaml"
    texts = (file.read_text(encoding="utf-8"), config_yaml(config)) if file.is_file() else ()
    old, new = [flatten(hide_secrets(parse_yaml(text, file.name).values)) for text in texts] or [{}, {}]
    changed = {name: (old.get(name), new.get(name)) for name in old | new if old.get(name) != new.get(name)}
    return Resumed(after_step=step, changed=changed)


def _note_schedules(parts: Parts, resumed: Resumed) -> None:
    """Log which learning-rate schedules have another end, because they follow a number of steps that has changed."""
    keys = [key for key in ("algorithm.num_steps", "algorithm.num_epochs") if key in resumed.changed]
    changes = ", ".join(f"{key} {' -> '.join(map(str, resumed.changed[key]))}" for key in keys)
    sections = {"policy": parts.config.policy, **{name: parts.config.further_policies[name] for name in parts.trained}}
    for name, section in sections.items():
        if changes and section.scheduler.name != "constant" and section.scheduler.total_steps is None:
            _LOG.info(
                "%s.scheduler.name=%s ends with the run, now at step %d (%s): the learning rates after step %d are "
                "those of the new schedule. Set %s.scheduler.total_steps to keep another end",
                name,
                section.scheduler.name,
                parts.config.algorithm.num_steps,
                changes,
                resumed.after_step,
                name,
            )


def resume(
    run_dir: str | Path, overrides: Sequence[str] = (), *, data: Data | None = None, trust_run: bool = False
) -> RunResult:
    """Resume the run in `run_dir` from its newest checkpoint; the numbers equal those of an uninterrupted run.

    `overrides` change its configuration, for example `algorithm.num_steps=200`. Raises `ConfigError` if the folder has
    no run or no checkpoint, or if its configuration asks for what only a run that is trusted may (`config.trust`);
    `trust_run` says that it is. A run on rows from Python needs the same rows as `data` again.
    """
    from rlframework.algorithms.checkpoints import newest_checkpoint

    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} holds no run to resume: it has no config.yaml. Give a run's output_dir")
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise _nothing_to_resume(Path(run_dir))
    source = None if trust_run else Path(run_dir)
    if source is not None:
        require_own_files(source)
    config = load_config(path, [*overrides, f"output_dir={run_dir}"], run=source)
    return run(config, data=data, checkpoint=checkpoint)


def _nothing_to_resume(run_dir: Path) -> ConfigError:
    """The error for a run without a checkpoint: it was to write none, or ended before the first one."""
    every = flatten(read_yaml(run_dir / "config.yaml").values).get("checkpoints.every")
    metrics, model = run_dir / METRICS_FILE, run_dir / "model"
    rows = read_history(metrics) if every and metrics.is_file() else []
    reason, remedy = "", ", and set checkpoints.every=N to write one every N steps"
    if every:
        reason = f": it ended at step {rows[-1]['step'] if rows else 0:.0f}, and checkpoints.every is {every}"
        remedy = ", with a smaller checkpoints.every if it may end early again"
    trained = f". To train its final model further, start a run with policy.model_name={model}"
    return ConfigError(
        f"{str(run_dir)!r} has no checkpoint to resume from{reason}. Start the run again with --overwrite, or in "
        f"another output_dir{remedy}{trained if model.is_dir() else ''}"
    )


def dry_run(config: Source, *, data: Data | None = None, overwrite: bool = False) -> list[str]:
    """Make every check that `run` makes before it starts workers, and return notes. Writes nothing.

    Plugins print what the run needs, see `rlframework_run_planned`. An `output_dir` in which `run` would not start
    (with this `overwrite`) is a warning, not an error. `config` and `data`: as for `run`.
    """
    from rlframework.observers.dispatch import require_observers
    from rlframework.runner.output_folder import check_output_dir

    config = config if isinstance(config, RunConfig) else load_config(config)
    config = config if data is None else with_data(config, data)
    require_models(config)
    manager = create_manager(config.plugins)
    manager.warn_of_broken()
    require_observers(config.observers, manager)
    with planned_parts(config, manager) as parts:
        algorithm_class(config, manager)(parts)
        run_planned(parts, manager, dry_run=True)
    try:
        check_output_dir(config, overwrite)
    except ConfigError as error:
        _LOG.warning("warning: %s", error)
    return list(notes_on(config))


def run_planned(parts: Parts, manager: PluginManager, *, dry_run: bool) -> None:
    """Tell plugins of the planned run. One that raises is named and the run goes on, except for user errors."""
    backend = backend_record(parts.config, manager)
    list(manager.call("rlframework_run_planned", lambda hook: hook(parts=parts, backend=backend, dry_run=dry_run)))
