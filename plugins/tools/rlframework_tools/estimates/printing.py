"""Estimates of a run before its start: made with all checks of a dry run, and printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlframework.base.errors import ConfigError, DataError, NotSupported
from rlframework.base.logs import plugin_logger
from rlframework.cli.common import print_table
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import RunConfig
from rlframework.config.validate import notes_on
from rlframework.datasets.sources.memory import Data
from rlframework.observers.dispatch import observer_problems, require_observers
from rlframework.plugins.manager import create_manager
from rlframework.rollout.parts import Parts
from rlframework.runner.data import with_data
from rlframework.runner.further_policies import used_policies
from rlframework.runner.output_folder import check_output_dir
from rlframework.runner.parts import algorithm_class, planned_parts, require_models
from rlframework_tools.estimates.estimate import Estimate, estimate, estimate_models
from rlframework_tools.estimates.plan import PlannedGpus, plan_run
from rlframework_tools.estimates.row_sizes import assumed_rows
from rlframework_tools.notes import notes_on_meaning

_LOG = plugin_logger(__name__)


def estimate_run(
    config: RunConfig, *, data: Data | None = None, overwrite: bool = False, planned: PlannedGpus | None = None
) -> Estimate:
    """Make every check that `run` makes before it starts workers, and estimate what the run needs. Writes nothing.

    An `output_dir` in which `run` would not start (with this `overwrite`) is a warning of the estimate, not an error.
    With `planned` GPUs, which this machine need not have, a model without a tokenizer is estimated too, from its
    `config.json` alone: the data is then not read; and packages of observers that are not installed are notes.
    `data`: as for `run`.
    """
    config = config if data is None else with_data(config, data)
    require_models(config)
    manager = create_manager(config.plugins)
    notes = (*notes_on(config), *notes_on_meaning(config))
    if planned is None:
        require_observers(config.observers, manager)
    else:
        problems = observer_problems(config.observers, manager)
        notes += tuple(f"note: on this machine {problem}" for problem in problems)
    algorithm = algorithm_class(config, manager)
    if planned is not None and not _has_tokenizer(config.policy):
        rows = assumed_rows(config)
        note = f"no tokenizer was found, so no data was read: rows of {rows.longest:,} tokens are assumed"
        views = {name: config.of(name) for name in used_policies(config, algorithm)}
        return estimate_models(config, manager, rows, views, planned=planned, notes=(note, *notes))
    with planned_parts(config, manager, elsewhere=planned is not None) as parts:
        algorithm(parts)
        found = estimate(parts, manager, planned=planned)
    found = replace(found, notes=(*found.notes, *notes))
    try:
        check_output_dir(config, overwrite)
    except ConfigError as error:
        return replace(found, output_dir_problem=str(error))
    return found


def print_brief(parts: Parts) -> None:
    """Print the estimate on stdout (with `observers.console`), and log its warnings.

    A model whose sizes cannot be determined does not prevent training; a message says so. Layers that `policy.lora`
    names and the model does not have raise `ConfigError`, before workers start. For invalid data it prints nothing,
    because the algorithm checks all data and reports the error.
    """
    try:
        found = _estimate(parts)
    except DataError:
        return
    except (ConfigError, NotSupported):
        raise
    except Exception as error:  # noqa: BLE001 - model configurations vary without limit
        _LOG.warning("no estimate of memory and disk: %s: %s", type(error).__name__, error)
        return
    if parts.config.observers.console:
        print(*found.lines(brief=True), sep="\n", flush=True)
    for warning in found.warnings():
        _LOG.warning("%s", warning)


def print_in_full(parts: Parts) -> None:
    """Print the estimate as a table with its notes, and log its warnings."""
    _print(_estimate(parts))


def print_elsewhere(config: str, overrides: Sequence[str], on: str, *, overwrite: bool) -> bool:
    """Print the estimate of a run for the GPUs `on`, such as `8xH100`; return whether it fits or may not fit."""
    plan = plan_run(config, overrides, PlannedGpus.parse(on))
    found = estimate_run(plan.config, overwrite=overwrite, planned=plan.gpus)
    _print(replace(found, notes=(*found.notes, *plan.notes)))
    print(f"planned for {plan.gpus} with {' '.join(plan.changes)}" if plan.changes else f"planned for {plan.gpus}")
    print(found.verdict())
    return found.fits


def _estimate(parts: Parts) -> Estimate:
    return estimate(parts, create_manager(parts.config.plugins))


def _print(found: Estimate) -> None:
    print_table(found.table())
    for note in filter(None, (*found.notes, found.idle_gpus())):
        print(note)
    for warning in found.warnings():
        _LOG.warning("%s", warning)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
"""Files of which a directory with a tokenizer has at least one."""


def _has_tokenizer(config: PolicyConfig) -> bool:
    """Whether the policy's tokenizer can be loaded; False if it is a model directory without one."""
    folder = Path(config.tokenizer_name or config.model_name)
    return not folder.is_dir() or any((folder / name).is_file() for name in _TOKENIZER_FILES)
