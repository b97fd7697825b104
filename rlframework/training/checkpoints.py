"""Save checkpoints of a run every N steps and when it is interrupted, and resume from them with the same numbers.

    checkpoints/step-000010/
        run.json         step, position in the data, random states of the driver, last metrics
        checksums.json   of run.json; the two folders have their own
        model/           weights: a Hugging Face directory, or its configuration and tokenizer with sharded weights
        optimizer/       moments, schedule, random states of the workers

The modules `portable` and `sharded` of `rlframework.policy.checkpoint` describe the two formats of weights and moments
(`checkpoints.format`); reading detects the format. A checkpoint is written under a temporary name and renamed when it
is complete, which may be after a later step if it is asynchronous.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from rlframework.algorithm import Parts
from rlframework.errors import DataError, DeadlineExceeded, RunInterrupted, RunTerminated, WorkerError
from rlframework.files import Replacement, remove_directory, remove_temporary_directories, reporting_full_disk
from rlframework.plugins.types import Capability
from rlframework.policy.checkpoint.manifest import check_files, write_manifest

_LOG = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "checkpoints"
_PREFIX = "step-"


def checkpoints_in(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    folder = Path(run_dir) / FOLDER
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit())


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest checkpoint of a run, or None."""
    return next(reversed(checkpoints_in(run_dir)), None)


def step_of_checkpoint(path: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(path.name.removeprefix(_PREFIX))


class RunState(BaseModel):
    """The contents of `run.json`; `metrics` has the last value of every metric, `measured` those of `step` alone."""

    format: int
    step: int
    state: dict[str, Any]
    environment: dict[str, Any]
    metrics: dict[str, float]
    measured: dict[str, float]
    random: dict[str, Any]


class Checkpoints:
    """Saves and restores the run of `parts`. The algorithm contributes its own state, which must fit into JSON."""

    def __init__(self, parts: Parts) -> None:
        """A run whose backend cannot save its optimizer stops immediately when interrupted."""
        self._parts = parts
        self._config = parts.config.checkpoints
        self._supported = Capability.PORTABLE_OPTIMIZER_STATE in parts.policy.capabilities
        self._folder = parts.config.output_dir / FOLDER
        self._stop: signal.Signals | None = None
        self._pending: Replacement | None = None
        """The checkpoint that is being written."""

    # -- saving -------------------------------------------------------------------------------------------------------

    def after_step(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], measured: Mapping[str, float]
    ) -> None:
        """Save if the configuration asks for it. After an interrupt, save and raise `RunInterrupted`.

        `metrics` has the latest value of every metric; `measured` those of this step alone.
        """
        due = self._config.every > 0 and step % self._config.every == 0
        if self._pending is not None and self._parts.policy.checkpoint_written():
            self.finish()
        if due or self._stop is not None:
            path = self.save(step, state, metrics, measured)
            if self._stop is not None:
                self.finish()  # the signal came while the checkpoint was being started
                raise RunInterrupted(self._stop, f"rlframework train --resume {self._parts.config.output_dir}", path)

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], measured: Mapping[str, float]
    ) -> Path:
        """Write the checkpoint of `step`, delete those that need not be kept, and return the checkpoint's path.

        An asynchronous save only begins here: `finish` completes it, and so does the next save.
        """
        self.finish()
        path = self._folder / f"{_PREFIX}{step:06d}"
        facts = RunState(
            format=FORMAT,
            step=step,
            state=dict(state),
            environment=dict(self._parts.environment.state_dict()),
            metrics=dict(metrics),
            measured=dict(measured),
            random=random_states(),
        )
        form, beside = self._config.format, self._config.asynchronous and self._stop is None
        how: dict[str, Any] = {} if form == "portable" else {"form": form, "asynchronous": beside}
        replacement = Replacement(path)
        folder = replacement.folder
        try:
            with reporting_full_disk(path):
                (folder / "run.json").write_text(json.dumps(facts.model_dump()) + "\n", encoding="utf-8")
                write_manifest(folder)
                self._parts.policy.save_checkpoint(str(folder / "model"), str(folder / "optimizer"), **how)
        except BaseException:
            replacement.abandon()
            raise
        self._pending = replacement
        if not beside:
            self.finish()
        return path

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and rename it; raise the error if it failed.

        Then delete the checkpoints that need not be kept.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._parts.policy.finish_checkpoint()
            pending.commit()
        except BaseException:
            pending.abandon()
            raise
        self._parts.observers.checkpoint_saved(step_of_checkpoint(pending.path), pending.path)
        for old in self._beyond_keeping():
            remove_directory(old)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """On exit, finish the checkpoint that is being written, even after an error if that is still possible."""
        try:
            yield
            self.finish()
        except BaseException as error:
            if self._pending is not None and not isinstance(error, KeyboardInterrupt):
                self._finish_after(error)
            raise

    def _finish_after(self, error: BaseException) -> None:
        """Finish or discard the pending checkpoint, and print a failure to do so: the caller raises `error`."""
        assert self._pending is not None
        step, lost = step_of_checkpoint(self._pending.path), isinstance(error, (WorkerError, DeadlineExceeded))
        try:
            self._pending.abandon() if lost else self.finish()
        except Exception as another:  # noqa: BLE001 - the caller raises the first error
            lost, error = True, another
        if lost:
            first_line = str(error).partition("\n")[0]
            _LOG.warning("the unfinished checkpoint of step %d is lost: %s", step, first_line)
        self._pending = None

    def _beyond_keeping(self) -> list[Path]:
        """All checkpoints except the last and the best."""
        found, config = checkpoints_in(self._parts.config.output_dir), self._config
        kept = set(found[-config.keep_last :])
        if config.keep_best:
            sign = 1.0 if config.best == "highest" else -1.0
            scores = {path: _read(path).measured.get(config.metric) for path in found}
            ranked = sorted((sign * score, path) for path, score in scores.items() if score is not None)
            kept.update(path for _, path in ranked[-config.keep_best :])
        return [path for path in found if path not in kept]

    # -- resuming -----------------------------------------------------------------------------------------------------

    def restore(self) -> RunState | None:
        """Restore the run and return the contents of its checkpoint's `run.json`; None for a new run."""
        remove_temporary_directories(self._folder)
        path = self._parts.checkpoint
        if path is None:
            return None
        check_files(path)
        facts = _read(path)
        self._parts.policy.load_checkpoint(str(path / "model"), str(path / "optimizer"))
        self._parts.environment.load_state_dict(facts.environment)
        restore_random_states(facts.random)
        return facts

    # -- interrupts -------------------------------------------------------------------------------------------

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM: finish the step and save a checkpoint; a second signal stops immediately."""
        if not (self._supported and self._config.on_interrupt):
            yield
            return

        def request_stop(number: int, frame: FrameType | None) -> None:
            if self._stop is not None:
                raise KeyboardInterrupt
            self._stop = signal.Signals(number)
            _LOG.warning("stopping after this step, with a checkpoint; a second signal stops immediately")

        with handling(request_stop, signal.SIGINT, signal.SIGTERM):
            try:
                yield
            except (WorkerError, DeadlineExceeded) as error:
                if self._stop is not None:  # workers may have received the signal too
                    raise RunTerminated(f"interrupted before the end of the step: {error}", self._stop) from error
                raise


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    """Handle `signals` with `handler` within the context. Only the main thread can; others change nothing."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals} if main else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _read(path: Path) -> RunState:
    file = path / "run.json"
    try:
        facts = RunState.model_validate(json.loads(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a valid checkpoint: {type(error).__name__}: {error}") from error
    if facts.format != FORMAT:
        raise DataError(f"{file} has format {facts.format}, but this version reads format {FORMAT}")
    return facts


def random_states() -> dict[str, Any]:
    """The global random states of this process: Python, numpy and torch."""
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(internal), gauss],
        "numpy": {**numpy_state, "state": {name: np.asarray(v).tolist() for name, v in numpy_state["state"].items()}},
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore what `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    state = dict(states["numpy"])
    state["state"] = {**state["state"], "key": np.array(state["state"]["key"], dtype=np.uint32)}
    np.random.set_state(state)
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(states["torch"])), dtype=torch.uint8))
