"""Training that lost a worker starts again from its last checkpoint, with new workers: `fault_tolerance` in the
configuration.

A restart does what `rlframework train --resume` does, in the same process: environment, data, workers and observers are
made anew, so that the run ends with the numbers of one that nothing happened to. Each is told on stderr, in
`restarts.jsonl`, and under `earlier` in `environment.json`.

Left out: errors that would come again (see `FaultToleranceConfig`), the loss of the driver's own process (a scheduler
starts it again, with `--resume`), and going on with fewer workers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.errors import DeadlineExceeded, WorkerLost
from rlframework.observers.jsonl import drop_steps_after
from rlframework.observers.secrets import hide_in_text
from rlframework.training.checkpoints import newest_checkpoint, random_states, restore_random_states, step_of_checkpoint

if TYPE_CHECKING:
    from rlframework.algorithm import RunResult
    from rlframework.config.sections import RunConfig
    from rlframework.observers.dispatch import Observers

RESTARTS_FILE = "restarts.jsonl"
"""In the folder of a run: an object a restart, with `time` (seconds since 1970), `restart`, `of`, `from_step`,
`reached_step`, `waited` (seconds) and `error`."""


@dataclass
class Attempt:
    """One go at a run: the checkpoint that it goes on from, and how far it came."""

    number: int
    checkpoint: Path | None
    observers: Observers | None = None
    """Those of its parts, from when training begins."""

    @property
    def first(self) -> bool:
        """Whether it is no restart."""
        return self.number == 0

    @property
    def steps_done(self) -> bool:
        """Whether its workers did a whole step."""
        return self.observers is not None and self.observers.last_step > 0


class Restarts:
    """Calls an attempt at a run again and again, as `config.fault_tolerance` allows.

    `checkpoint`: where the run goes on from, of one that is resumed. `wait` is called with the seconds of the back-off.
    """

    def __init__(
        self, config: RunConfig, checkpoint: Path | None = None, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._config = config.fault_tolerance
        self._output_dir = config.output_dir
        self._given = checkpoint
        self._wait = wait
        self._begun_with = random_states() if self._config.max_restarts else {}
        if self._config.max_restarts:
            _tell(*_shortcomings(config))

    def run(self, attempt: Callable[[Attempt], RunResult]) -> RunResult:
        """The result of the attempt that came to its end; else the error of the last one."""
        tried, in_a_row = Attempt(0, self._given), 0
        while True:
            try:
                return attempt(tried)
            except Exception as error:
                reached = newest_checkpoint(self._output_dir) or self._given
                if not self._config.max_restarts or not _can_be_done_again(error, tried):
                    raise
                in_a_row = 1 if reached != tried.checkpoint else in_a_row + 1
                if in_a_row > self._config.max_restarts:
                    _tell(
                        f"gave up after {self._config.max_restarts} restart(s) in a row without a new checkpoint "
                        "(fault_tolerance.max_restarts)"
                    )
                    raise
                self._prepare(error, tried, reached, in_a_row)
            tried = Attempt(tried.number + 1, reached)

    def _prepare(self, error: Exception, tried: Attempt, checkpoint: Path | None, in_a_row: int) -> None:
        """Tell of the restart, wait, and put back what the attempt changed in this process and in the run's folder."""
        seconds = min(self._config.backoff * 2.0 ** (in_a_row - 1), self._config.max_backoff)
        where = "the beginning, as there is no checkpoint" if checkpoint is None else str(checkpoint)
        text = hide_in_text(str(error))
        first_line = text.partition("\n")[0]
        _tell(f"restart {in_a_row} of {self._config.max_restarts} from {where}, in {seconds:g} s: {first_line}")
        step = -1 if checkpoint is None else step_of_checkpoint(checkpoint)
        reached = tried.observers.last_step if tried.observers is not None else None
        self._log(
            restart=in_a_row,
            of=self._config.max_restarts,
            from_step=max(step, 0),
            reached_step=reached,
            waited=seconds,
            error=f"{type(error).__name__}: {text}",
        )
        self._wait(seconds)
        drop_steps_after(self._output_dir, step)
        if checkpoint is None:
            restore_random_states(self._begun_with)

    def _log(self, **facts: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), **facts}, ensure_ascii=False)
        with (self._output_dir / RESTARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _can_be_done_again(error: Exception, tried: Attempt) -> bool:
    """Whether `error` is the loss of a worker.

    A call that reached its deadline is one where the same workers did a step in time before: then one of them hangs, or
    its machine left and nobody has noticed yet. While a restart starts, every error counts as one that failed: all this
    worked at first, and what is missing now may come back.
    """
    if tried.observers is None:
        return not tried.first
    return isinstance(error, WorkerLost) or (isinstance(error, DeadlineExceeded) and tried.steps_done)


def _shortcomings(config: RunConfig) -> list[str]:
    told = []
    given = f"fault_tolerance.max_restarts={config.fault_tolerance.max_restarts}"
    if config.worker_group.name == "inline" and config.generation.workers is None:
        told.append(
            f"note: {given}, but worker_group.name=inline has its worker in this process, so none can be lost alone; "
            "take worker_group.name=processes or ray"
        )
    elif not config.checkpoints.every:
        told.append(
            f"note: {given}, but checkpoints.every=0, so that a restart begins at the beginning; set "
            "checkpoints.every=N to lose at most N steps"
        )
    return told


def _tell(*lines: str) -> None:
    if lines:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
