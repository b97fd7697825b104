"""Restart a run from its last checkpoint after the loss of a worker (`fault_tolerance`).

A restart does what `rlframework train --resume` does, in the same process: it rebuilds environment, data, workers and
observers, so the run ends with the numbers of an undisturbed one. It is logged, and reported in `restarts.jsonl` and
under `earlier` in `environment.json`. Not covered: errors that would recur (see `FaultToleranceConfig`), the loss of
the driver's process (a scheduler can start it again with `--resume`), and continuing with fewer workers.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.algorithms.algorithm import RunResult
from rlframework.base.errors import DeadlineExceeded, WorkerLost
from rlframework.base.files import AppendedFile
from rlframework.base.logs import printable
from rlframework.base.secrets import hide_in_text
from rlframework.config.sections import RunConfig
from rlframework.observers.jsonl import drop_steps_after

if TYPE_CHECKING:
    from rlframework.observers.dispatch import Observers

_LOG = logging.getLogger(__name__)

RESTARTS_FILE = "restarts.jsonl"
"""File in a run's folder with one JSON object per restart: `time` (seconds since 1970), `restart`, `of`, `from_step`,
`reached_step`, `waited` (seconds) and `error`."""


@dataclass
class Attempt:
    """An attempt at a run, 0 for the original start: its checkpoint, and its observers, None until training begins."""

    number: int
    checkpoint: Path | None
    observers: Observers | None = None


def run_with_restarts(
    config: RunConfig,
    attempt: Callable[[Attempt], RunResult],
    checkpoint: Path | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> RunResult:
    """Return the result of the first attempt that succeeds, or raise the error of the last one.

    Attempts repeat as often as `config.fault_tolerance` allows. `checkpoint` is the one that a resumed run starts from.
    `wait` is called with the seconds of back-off.
    """
    section, current, in_a_row = config.fault_tolerance, Attempt(0, checkpoint), 0
    if section.max_restarts:
        _report_limitations(config)
    while True:
        try:
            return attempt(current)
        except Exception as error:
            from rlframework.algorithms import checkpoints  # imports torch

            if not _is_recoverable(error, current):
                raise
            newest = checkpoints.newest_checkpoint(config.output_dir)
            reached = newest or checkpoint
            in_a_row = 1 if reached != current.checkpoint else in_a_row + 1
            if in_a_row > section.max_restarts:
                _report_end(config, newest)
                raise
            seconds = min(section.backoff * 2.0 ** (in_a_row - 1), section.max_backoff)
            step = -1 if reached is None else checkpoints.step_of_checkpoint(reached)
            text = hide_in_text(str(error))
            _LOG.warning(
                "restart %d of %d from %s, in %g s: %s",
                in_a_row,
                section.max_restarts,
                "the beginning, as there is no checkpoint" if reached is None else reached,
                seconds,
                text.partition("\n")[0],
            )
            facts = {
                "time": round(time.time(), 3),
                "restart": in_a_row,
                "of": section.max_restarts,
                "from_step": max(step, 0),
                "reached_step": None if current.observers is None else current.observers.last_step,
                "waited": seconds,
                "error": f"{type(error).__name__}: {text}",
            }
        with closing(AppendedFile(config.output_dir / RESTARTS_FILE)) as file:
            file.write((printable(json.dumps(facts, ensure_ascii=False)) + "\n").encode())
        wait(seconds)
        drop_steps_after(config.output_dir, step)
        current = Attempt(current.number + 1, reached)


def _report_end(config: RunConfig, newest: Path | None) -> None:
    """Say why there is no further restart, or how to continue from the `newest` checkpoint, if there is one."""
    if most := config.fault_tolerance.max_restarts:
        text = "giving up after %d restart(s) in a row without a new checkpoint (fault_tolerance.max_restarts)"
        _LOG.error(text, most)
    elif newest is not None:
        _LOG.error(
            "a worker was lost after %s was written: `%s` continues there; "
            "fault_tolerance.max_restarts=N would have done so by itself",
            newest,
            config.resume_command,
        )


def _is_recoverable(error: Exception, failed: Attempt) -> bool:
    """Whether `error` is the loss of a worker.

    A missed deadline counts as one if the same workers completed a step before: one of them hangs, or its machine is
    gone and this has not been detected yet. While a restart builds its parts, every error counts: all of this worked
    the first time, so the missing resource may return.
    """
    if failed.observers is None:
        return failed.number > 0
    return isinstance(error, WorkerLost) or (isinstance(error, DeadlineExceeded) and failed.observers.last_step > 0)


def _report_limitations(config: RunConfig) -> None:
    if config.worker_group.name == "inline" and config.generation.workers is None:
        why = (
            "worker_group.name=inline runs its worker in this process, so it cannot be restarted; "
            "set worker_group.name=processes or ray"
        )
    elif not config.checkpoints.every:
        why = "checkpoints.every=0, so a restart repeats the whole run; set checkpoints.every=N to lose at most N steps"
    else:
        return
    _LOG.warning("note: fault_tolerance.max_restarts=%d, but %s", config.fault_tolerance.max_restarts, why)
