"""Save checkpoints of a run every N steps, at its end and when interrupted, and resume with the same numbers.

    checkpoints/step-000010/
        run.json         step, position in the data, random states of the driver, last metrics
        checksums.json   of run.json; the two folders have their own
        model/           weights: a Hugging Face directory, or its configuration and tokenizer with sharded weights
        optimizer/       moments, schedule, random states of the workers
        reference/       weights of the reference policy, if `algorithm.reference_sync` has changed them
        critic/          the folders `model` and `optimizer` of a further policy that is trained

The modules `portable` and `sharded` of `rlframework.policy.checkpoint` describe the two formats of weights and moments
(`checkpoints.format`); reading detects the format. A checkpoint is written under a temporary name and renamed when it
is complete, which may be after a later step if it is asynchronous.
"""

from __future__ import annotations

import json
import logging
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel

from rlframework.algorithms.ending import end_run, ending_on_signals, handling, raise_if_ended
from rlframework.algorithms.reference_sync import SYNCS
from rlframework.base.errors import DataError, DeadlineExceeded, RunInterrupted, RunTerminated, WorkerError, WriteError
from rlframework.base.files import LOCK_FILE, Replacement, remove_directory, remove_temporary, writing
from rlframework.plugins.types import Capability
from rlframework.policy.checkpoint.manifest import check_files, write_manifest
from rlframework.rollout.parts import Parts

if TYPE_CHECKING:
    from rlframework.config.sections import CheckpointsConfig
    from rlframework.policy.client import Policy

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


def kept_checkpoints(scores: Mapping[str, float | None], config: CheckpointsConfig) -> set[str]:
    """The names of the checkpoints to keep, the last and the best, of all with their values of `config.metric`."""
    kept = set(sorted(scores)[-config.keep_last :])
    if config.keep_best:
        kept.update(_ranked(scores, config)[-config.keep_best :])
    return kept


def best_checkpoint(run_dir: Path, config: CheckpointsConfig) -> tuple[Path, float, int] | None:
    """The last checkpoint with the best `config.metric`, its value, and how many have that value; None without any."""
    scores = {path.name: _read(path).measured.get(config.metric) for path in checkpoints_in(run_dir)}
    best = next(reversed(_ranked(scores, config)), "")
    score = scores.get(best)
    return None if score is None else (run_dir / FOLDER / best, score, [*scores.values()].count(score))


def has_measured(run_dir: Path, metric: str) -> bool:
    """Whether a step of a run, up to its newest checkpoint, has measured `metric`."""
    newest = newest_checkpoint(run_dir)
    return newest is not None and metric in _read(newest).metrics


def _ranked(scores: Mapping[str, float | None], config: CheckpointsConfig) -> list[str]:
    """The names of the checkpoints that have a score, the best last."""
    sign = 1.0 if config.best == "highest" else -1.0
    return [name for _, name in sorted((sign * score, name) for name, score in scores.items() if score is not None)]


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
    """Saves and restores the run of `parts`. The algorithm contributes its own state, which must fit into JSON.

    A run whose backend cannot save its optimizer stops immediately when interrupted.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._trained: dict[str, Policy] = {".": parts.policy, **parts.trained}
        """The policies that are saved, by their folders in a checkpoint."""
        self._config = parts.config.checkpoints
        self._folder = parts.config.output_dir / FOLDER
        self._stop: signal.Signals | None = None
        self._lock: Path | None = None
        """The lock of the run's folder, if it has one."""
        self._noted_metric = False
        self._pending: Replacement | None = None
        """The checkpoint that is being written."""

    def note_metric(self, measured: Mapping[str, float]) -> None:
        """Warn, once per run, if the metric of `keep_best` is not among those of its kind that a step has measured."""
        kind, metric = self._config.metric.partition("/")[0] + "/", self._config.metric
        known = sorted(name for name in measured if name.startswith(kind))
        if self._noted_metric or not (self._config.keep_best and known):
            return
        self._noted_metric = True
        if metric not in known:
            _LOG.warning(
                "checkpoints.keep_best=%d has nothing to compare: there is no metric checkpoints.metric=%r; there are "
                "%s",
                self._config.keep_best,
                metric,
                ", ".join(known),
            )

    def after_step(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        measured: Mapping[str, float],
        *,
        last: bool = False,
    ) -> None:
        """Save if the configuration asks for it. After an interrupt, save and raise `RunInterrupted`.

        `metrics` has the latest value of every metric; `measured` those of this step alone. `last`: the run ends after
        this step. An asynchronous save only begins here: a later step or `finishing` completes it.
        """
        self.note_metric(measured)
        if self._pending is not None and all(policy.checkpoint_written() for policy in self._trained.values()):
            self._finish()
        due = self._config.every > 0 and (last or step % self._config.every == 0)
        if due or self._stop is not None:
            self._finish()
            facts = RunState(
                format=FORMAT,
                step=step,
                state=dict(state),
                environment=dict(self._parts.environment.state_dict()),
                metrics=dict(metrics),
                measured=dict(measured),
                random=random_states(),
            )
            path = self._folder / f"{_PREFIX}{step:06d}"
            self._pending = self._begin(path, facts)
            if self._stop is not None or not self._config.asynchronous:
                self._finish()
            if self._stop is not None:
                raise RunInterrupted(self._stop, self._parts.config.resume_command, path)

    def _begin(self, path: Path, facts: RunState) -> Replacement:
        if self._lock is not None and not self._lock.exists():
            raise WriteError(
                f"cannot write {path}: {self._lock.parent} was removed or moved during the run, with its configuration "
                "and earlier checkpoints; move it back and resume the run, or start it again"
            )
        replacement = Replacement(path)
        folder = replacement.folder
        try:
            with writing(path):
                (folder / "run.json").write_text(json.dumps(facts.model_dump()) + "\n", encoding="utf-8")
                write_manifest(folder)
                for place, policy in self._trained.items():
                    policy.save_checkpoint(
                        str(folder / place / "model"),
                        str(folder / place / "optimizer"),
                        form=self._config.format,
                        asynchronous=self._config.asynchronous and self._stop is None,
                        **self._reference(folder, place, facts),
                    )
        except BaseException:
            replacement.abandon()
            raise
        return replacement

    def _reference(self, folder: Path, place: str, facts: RunState) -> dict[str, str]:
        """Return the argument for the folder of the reference, if the policy of `place` has one that has changed."""
        changed = place == "." and facts.state.get(SYNCS, 0) and self._parts.policy.has_reference
        return {"reference_path": str(folder / "reference")} if changed else {}

    def _finish(self) -> None:
        """Wait for the pending checkpoint and rename it; then delete all except the last and the best."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            for policy in self._trained.values():
                policy.finish_checkpoint()
            pending.commit()
        except BaseException:
            pending.abandon()
            raise
        self._parts.observers.checkpoint_saved(step_of_checkpoint(pending.path), pending.path)
        self._upload(pending.path)
        self._remove_old()

    def _upload(self, path: Path) -> None:
        """Begin to upload a complete checkpoint, if the configuration asks for it."""
        if self._parts.uploads is not None:
            self._parts.uploads.add(path, self._score(path))

    def _score(self, path: Path) -> float | None:
        return _read(path).measured.get(self._config.metric) if self._config.keep_best else None

    def _remove_old(self) -> None:
        """Delete the checkpoints that are neither kept nor being uploaded."""
        found = checkpoints_in(self._parts.config.output_dir)
        kept = kept_checkpoints({path.name: self._score(path) for path in found}, self._config)
        if self._parts.uploads is not None:
            kept |= {path.name for path in self._parts.uploads.in_use()}
        for path in found:
            if path.name not in kept:
                remove_directory(path)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """On exit, finish the checkpoint that is being written, even after an error if that is still possible."""
        try:
            yield
            self._finish()
        except BaseException as error:
            pending, lost = self._pending, isinstance(error, (WorkerError, DeadlineExceeded))
            if pending is not None and not isinstance(error, KeyboardInterrupt):
                reason = error
                try:
                    pending.abandon() if lost else self._finish()
                except Exception as another:  # noqa: BLE001 - the first error is raised
                    lost, reason = True, another
                if lost:
                    step, first_line = step_of_checkpoint(pending.path), str(reason).partition("\n")[0]
                    _LOG.warning("the unfinished checkpoint of step %d is lost: %s", step, first_line)
            raise

    def restore(self) -> RunState | None:
        """Restore the run and return the contents of its checkpoint's `run.json`; None for a new run.

        The random states are left to the caller: see `restore_random_states`.
        """
        lock = self._parts.config.output_dir / LOCK_FILE
        self._lock = lock if lock.exists() else None
        remove_temporary(self._folder)
        path = self._parts.checkpoint
        if path is None:
            return None
        check_files(path)
        facts = _read(path)
        for place, policy in self._trained.items():
            folders = str(path / place / "model"), str(path / place / "optimizer")
            policy.load_checkpoint(*folders, **self._reference(path, place, facts))
        self._parts.environment.load_state_dict(facts.environment)
        self._upload(path)  # unless it is there: the upload may have been interrupted
        return facts

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM: finish the step and save a checkpoint; a second signal stops immediately."""
        supported = all(Capability.PORTABLE_OPTIMIZER_STATE in policy.capabilities for policy in self._trained.values())
        if not (supported and self._config.on_interrupt):
            yield
            return

        def request_stop(number: int, frame: FrameType | None) -> None:
            if self._stop is not None:
                end_run("interrupted before the end of the step", number)
            self._stop = signal.Signals(number)
            _LOG.warning("stopping after this step, with a checkpoint; a second signal stops immediately")

        raise_if_ended()
        with ending_on_signals(), handling(request_stop, signal.SIGINT, signal.SIGTERM):
            try:
                yield
            except (WorkerError, DeadlineExceeded) as error:
                if self._stop is not None:  # workers may have received the signal too
                    raise RunTerminated(f"interrupted before the end of the step: {error}", self._stop) from error
                raise


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
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpy_state | {"state": numpy_state["state"] | {"key": key}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def seed_random_states(seed: int) -> None:
    """Seed the global random number generators of this process: Python's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore what `random_states` returned, also as JSON gives it back."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
