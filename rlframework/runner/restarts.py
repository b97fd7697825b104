"""Restart training from its last checkpoint, with new workers, after the loss of a worker (`fault_tolerance`).

A restart does what `rlframework train --resume` does, in the same process: it rebuilds environment, data, workers and
observers, so the run ends with the numbers of an undisturbed one. Every restart is logged, and reported in
`restarts.jsonl` and under `earlier` in `environment.json`.

Not covered: errors that would recur (see `FaultToleranceConfig`), the loss of the driver's process (a scheduler can
start it again with `--resume`), and continuing with fewer workers.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlframework.algorithm import RunResult
from rlframework.config.sections import RunConfig
from rlframework.errors import DeadlineExceeded, WorkerLost
from rlframework.observers.dispatch import Observers
from rlframework.observers.jsonl import drop_steps_after
from rlframework.observers.secrets import hide_in_text
from rlframework.training.checkpoints import newest_checkpoint, random_states, restore_random_states, step_of_checkpoint

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


class Restarts:
    """Repeats attempts at a run as often as `config.fault_tolerance` allows.

    `checkpoint` is the one that a resumed run starts from. `wait` is called with the seconds of back-off.
    """

    def __init__(
        self, config: RunConfig, checkpoint: Path | None = None, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._config = config.fault_tolerance
        self._output_dir = config.output_dir
        self._initial_checkpoint = checkpoint
        self._wait = wait
        self._initial_random_states = random_states() if self._config.max_restarts else {}
        if self._config.max_restarts:
            _report_limitations(config)

    def run(self, attempt: Callable[[Attempt], RunResult]) -> RunResult:
        """Return the result of the first attempt that succeeds, or raise the error of the last one."""
        current, in_a_row = Attempt(0, self._initial_checkpoint), 0
        while True:
            try:
                return attempt(current)
            except Exception as error:
                reached = newest_checkpoint(self._output_dir) or self._initial_checkpoint
                if not self._config.max_restarts or not _is_recoverable(error, current):
                    raise
                in_a_row = 1 if reached != current.checkpoint else in_a_row + 1
                if in_a_row > self._config.max_restarts:
                    _LOG.error(
                        "giving up after %d restart(s) in a row without a new checkpoint "
                        "(fault_tolerance.max_restarts)",
                        self._config.max_restarts,
                    )
                    raise
                self._prepare(error, current, reached, in_a_row)
            current = Attempt(current.number + 1, reached)

    def _prepare(self, error: Exception, failed: Attempt, checkpoint: Path | None, in_a_row: int) -> None:
        """Report the restart, wait, and undo what the attempt changed in this process and in the run's folder."""
        config = self._config
        seconds = min(config.backoff * 2.0 ** (in_a_row - 1), config.max_backoff)
        where = "the beginning, as there is no checkpoint" if checkpoint is None else str(checkpoint)
        text = hide_in_text(str(error))
        first_line = text.partition("\n")[0]
        _LOG.warning("restart %d of %d from %s, in %g s: %s", in_a_row, config.max_restarts, where, seconds, first_line)
        step = -1 if checkpoint is None else step_of_checkpoint(checkpoint)
        facts = {
            "time": round(time.time(), 3),
            "restart": in_a_row,
            "of": config.max_restarts,
            "from_step": max(step, 0),
            "reached_step": failed.observers.last_step if failed.observers is not None else None,
            "waited": seconds,
            "error": f"{type(error).__name__}: {text}",
        }
        with (self._output_dir / RESTARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts, ensure_ascii=False) + "\n")
        self._wait(seconds)
        drop_steps_after(self._output_dir, step)
        if checkpoint is None:
            restore_random_states(self._initial_random_states)


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
