"""Checkpoints of a run: written every so many steps and when it is told to stop, gone on from with the same numbers.

    checkpoints/step-000010/
        run.json         the step, where the data stands, random states of the driver, the last metrics
        checksums.json   of run.json; the two folders have their own
        model/           the weights: a Hugging Face directory, or the configuration and tokenizer of one and pieces
        optimizer/       moments, schedule, random states of the workers

Both forms of the weights and moments (`checkpoints.format`) are described in `rlframework.policy.checkpoint`, `portable`
and `sharded`; whichever is there is read. A folder of that name is complete: it is written beside and renamed, after a
later step if it is written asynchronously.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlframework.errors import ConfigError, DataError, DeadlineExceeded, RunInterrupted, RunTerminated, WorkerError
from rlframework.files import Replacement, remove_directory, remove_leftovers, telling_no_space
from rlframework.plugins.types import Capability
from rlframework.policy.checkpoint.manifest import check_files, write_manifest

if TYPE_CHECKING:
    from rlframework.algorithm import Parts

FORMAT = 1
FOLDER = "checkpoints"
_PREFIX = "step-"


def checkpoints_in(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    folder = Path(run_dir) / FOLDER
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit())


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest checkpoint of a run, None where there is none."""
    return next(reversed(checkpoints_in(run_dir)), None)


def latest_checkpoint(run_dir: str | Path) -> Path:
    """The newest checkpoint of a run; a `ConfigError` where there is none."""
    found = newest_checkpoint(run_dir)
    if found is None:
        raise ConfigError(
            f"{str(run_dir)!r} has no checkpoint to go on from: none was written before the run ended. Start it again "
            "in another output_dir; checkpoints.every=N writes one every N steps"
        )
    return found


def step_of_checkpoint(path: Path) -> int:
    """The step that a checkpoint was written after."""
    return int(path.name.removeprefix(_PREFIX))


@dataclass(frozen=True)
class _Pending:
    """A checkpoint on its way to where it belongs."""

    step: int
    replacement: Replacement


class Checkpoints:
    """Saves and restores a run of `parts`; an algorithm gives what is its own as numbers and words for JSON."""

    def __init__(self, parts: Parts) -> None:
        """Where the backend cannot save its optimizer, a run that is told to stop does so at once."""
        self._parts = parts
        self._config = parts.config.checkpoints
        self._supported = Capability.PORTABLE_OPTIMIZER_STATE in parts.policy.capabilities
        self._folder = parts.config.output_dir / FOLDER
        self._stop: signal.Signals | None = None
        self._pending: _Pending | None = None

    # -- saving -------------------------------------------------------------------------------------------------------

    def after_step(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], measured: Mapping[str, float]
    ) -> None:
        """Save where the configuration says so; where the run was told to stop, save and raise `RunInterrupted`.

        `metrics`: the last value of each so far; `measured`: those of this step alone.
        """
        due = self._config.every > 0 and step % self._config.every == 0
        if self._pending is not None and self._parts.policy.checkpoint_written():
            self.finish()
        if due or self._stop is not None:
            path = self.save(step, state, metrics, measured)
            if self._stop is not None:
                self.finish()  # told while one was begun
                raise RunInterrupted(self._stop, f"rlframework train --resume {self._parts.config.output_dir}", path)

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], measured: Mapping[str, float]
    ) -> Path:
        """Write the checkpoint of `step`, then let go of those that need not be kept; where it lies, or will.

        Of an asynchronous one this is its beginning: `finish` ends it, and so does the next one.
        """
        self.finish()
        path = self._folder / f"{_PREFIX}{step:06d}"
        facts = {
            "format": FORMAT,
            "step": step,
            "state": dict(state),
            "environment": self._parts.environment.state_dict(),
            "metrics": dict(metrics),
            "measured": dict(measured),
            "random": random_states(),
        }
        beside = self._config.asynchronous and self._stop is None
        pending = _Pending(step, Replacement(path))
        try:
            with telling_no_space(path):
                self._write(pending.replacement.folder, facts, beside)
        except BaseException:
            pending.replacement.abandon()
            raise
        self._pending = pending
        if not beside:
            self.finish()
        return path

    def _write(self, folder: Path, facts: Mapping[str, Any], beside: bool) -> None:
        (folder / "run.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        write_manifest(folder)
        form = self._config.format
        how: dict[str, Any] = {} if form == "portable" else {"form": form, "asynchronous": beside}
        self._parts.policy.save_checkpoint(str(folder / "model"), str(folder / "optimizer"), **how)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if one is, and put it where it belongs; or raise what failed.

        Then let go of those that need not be kept.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._parts.policy.finish_checkpoint()
            pending.replacement.commit()
        except BaseException:
            pending.replacement.abandon()
            raise
        self._parts.observers.checkpoint_saved(pending.step, pending.replacement.path)
        for old in self._beyond_keeping():
            remove_directory(old)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Behind it no checkpoint is being written: where the block fails, it is finished if that is still possible."""
        try:
            yield
            self.finish()
        except BaseException as error:
            if self._pending is not None and not isinstance(error, KeyboardInterrupt):
                self._finish_after(error)
            raise

    def _finish_after(self, error: BaseException) -> None:
        """Told, since the error is what the caller learns."""
        assert self._pending is not None
        step, lost = self._pending.step, isinstance(error, (WorkerError, DeadlineExceeded))
        try:
            if lost:
                self._pending.replacement.abandon()
            else:
                self.finish()
        except Exception as another:  # noqa: BLE001 - what failed first is what is raised
            lost, error = True, another
        if lost:
            first_line = str(error).partition("\n")[0]
            print(f"the checkpoint of step {step} was being written and is lost: {first_line}", file=sys.stderr)
        self._pending = None

    def _beyond_keeping(self) -> list[Path]:
        """All but the last and the best."""
        there = checkpoints_in(self._parts.config.output_dir)
        kept = set(there[-self._config.keep_last :])
        if self._config.keep_best:
            sign = 1.0 if self._config.best == "highest" else -1.0
            scores = {path: self._score(path) for path in there}
            scored = [path for path in there if scores[path] is not None]
            kept.update(sorted(scored, key=lambda path: sign * (scores[path] or 0.0))[-self._config.keep_best :])
        return [path for path in there if path not in kept]

    def _score(self, path: Path) -> float | None:
        measured: dict[str, float] = _read(path)["measured"]
        return measured.get(self._config.metric)

    # -- going on -----------------------------------------------------------------------------------------------------

    def restore(self) -> dict[str, Any] | None:
        """What the run goes on from: `step`, `state` and `metrics`; None for a run that starts."""
        remove_leftovers(self._folder)
        path = self._parts.checkpoint
        if path is None:
            return None
        check_files(path)
        facts = _read(path)
        self._parts.policy.load_checkpoint(str(path / "model"), str(path / "optimizer"))
        self._parts.environment.load_state_dict(facts["environment"])
        restore_random_states(facts["random"])
        return facts

    # -- being told to stop -------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, Ctrl-C and SIGTERM let the step end and a checkpoint be written; a second one ends at once."""
        main = threading.current_thread() is threading.main_thread()
        if not (self._supported and self._config.on_interrupt and main):
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def told(number: int, frame: FrameType | None) -> None:
            if self._stop is not None:
                raise KeyboardInterrupt
            self._stop = signal.Signals(number)
            print("stopping after this step, with a checkpoint; once more stops at once", file=sys.stderr, flush=True)

        for number in before:
            signal.signal(number, told)
        try:
            yield
        except (WorkerError, DeadlineExceeded) as error:
            if self._stop is not None:  # workers may be told too, and are lost because of it
                raise RunTerminated(f"told to stop, and the step did not end: {error}", self._stop) from error
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _read(path: Path) -> dict[str, Any]:
    file = path / "run.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = facts["format"]
        facts["step"], facts["state"], facts["environment"], facts["metrics"], facts["measured"], facts["random"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read as a checkpoint: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise DataError(f"{file} is of format {found!r}, and this version reads {FORMAT}")
    return facts


def random_states() -> dict[str, Any]:
    """Those of this process: Python's, numpy's global one and torch's, for whoever draws from them."""
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(internal), gauss],
        "numpy": {**numpy_state, "state": {name: np.asarray(v).tolist() for name, v in numpy_state["state"].items()}},
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set them to what `random_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    state = dict(states["numpy"])
    state["state"] = {**state["state"], "key": np.array(state["state"]["key"], dtype=np.uint32)}
    np.random.set_state(state)
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(states["torch"])), dtype=torch.uint8))
