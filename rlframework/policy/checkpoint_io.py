"""The worker's checkpoint calls: Hugging Face directories, and the state that training resumes from.

The portable form is described in `checkpoint/portable.py`, the sharded one in
`checkpoint/sharded.py`, the engine's own in `checkpoint/native.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.errors import ConfigError, NotSupported
from rlframework.policy.all_ranks import run_on_all_ranks
from rlframework.policy.checkpoint.manifest import check_files
from rlframework.policy.checkpoint.native import native_files, save_native
from rlframework.policy.checkpoint.portable import (
    Progress,
    SavedMoments,
    random_states,
    read_progress,
    restore_random_states,
    save_optimizer,
    write_training,
)
from rlframework.policy.checkpoint.pretrained import write_config
from rlframework.policy.checkpoint.saved import is_native, is_sharded
from rlframework.policy.engine import Engine
from rlframework.policy.progress import TrainingProgress
from rlframework.policy.residency import Part, Residency
from rlframework.policy.trained_weights import TrainedWeights

if TYPE_CHECKING:
    from rlframework.policy.checkpoint.sharded import CheckpointSave

FORMS = ("portable", "sharded", "native")


class CheckpointIO:
    """Writes and reads the checkpoints of an engine. At most one save is in progress."""

    def __init__(
        self,
        engine: Engine,
        residency: Residency,
        weights: TrainedWeights,
        progress: TrainingProgress,
        *,
        backend: str,
        has_optimizer: bool,
    ) -> None:
        """`backend`: the name that native checkpoints are marked with, and rejected without."""
        self.engine = engine
        self._residency, self._weights, self._progress = residency, weights, progress
        self._backend, self._has_optimizer = backend, has_optimizer
        self._save: CheckpointSave | None = None

    # -- writing ------------------------------------------------------------------------------------------------------

    def save(
        self,
        weights_path: str,
        optimizer_path: str | None,
        tokenizer_path: str | None,
        form: str,
        asynchronous: bool,
    ) -> None:
        """See `PolicyWorker.save_checkpoint`."""
        if form not in FORMS:
            raise ConfigError(f"unknown checkpoint form {form!r}; choose one of {', '.join(FORMS)}")
        if asynchronous and form != "sharded":
            raise ConfigError(f"a {form} checkpoint cannot be written asynchronously; use the form sharded")
        if optimizer_path is not None and not self._has_optimizer:
            raise NotSupported("this worker was built without an optimizer, so it has no optimizer state to save")
        self.finish()  # the previous one
        if form != "sharded":  # shards are written from whichever device they are on
            self._residency.onload(*_parts(optimizer_path))
        if form == "portable":
            self._save_portable(weights_path, optimizer_path)
        elif form == "native":
            self._save_native(weights_path, optimizer_path)
        else:
            self._start_sharded(weights_path, optimizer_path, asynchronous)
        if tokenizer_path is not None and self.engine.context.rank == 0:
            self.engine.tokenizer.save_pretrained(tokenizer_path)
        if not asynchronous:
            self.finish()

    def _save_portable(self, weights_path: str, optimizer_path: str | None) -> None:
        engine = self.engine
        moments = engine.gather_moments()  # raises before anything is written
        self._weights.write(weights_path)
        if optimizer_path is not None:
            save_optimizer(
                optimizer_path, moments, self._saved_progress(), engine.context, engine.device, self._backend
            )

    def _save_native(self, weights_path: str, optimizer_path: str | None) -> None:
        engine, optimizer = self.engine, optimizer_path is not None
        facts = {"backend": self._backend, "workers": engine.context.world_size, "optimizer": optimizer}
        write = partial(engine.save_native, optimizer=optimizer)
        save_native(weights_path, engine.context, beside=self._write_config, write=write, facts=facts)
        if optimizer_path is not None:
            progress = self._saved_progress()
            save_optimizer(optimizer_path, iter(()), progress, engine.context, engine.device, self._backend)

    def _start_sharded(self, weights_path: str, optimizer_path: str | None, asynchronous: bool) -> None:
        from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan

        context = self.engine.context
        state = self.engine.sharded_state()
        plans = [DirectoryPlan(weights_path, state.weights, self._write_config)]
        if optimizer_path is not None:
            parts = run_on_all_ranks(context, lambda: state.steps)
            steps = {name: count for part in parts for name, count in part.items()}
            states = random_states(context, self.engine.device)
            write = partial(
                write_training, steps=steps, progress=self._saved_progress(), states=states, backend=self._backend
            )
            plans.append(DirectoryPlan(optimizer_path, state.moments, write))
        self._save = CheckpointSave(plans, context, asynchronous=asynchronous)

    def _write_config(self, folder: Path) -> None:
        config = self.engine.config
        write_config(folder, config.model_name, self.engine.tokenizer, config.trust_remote_code)

    def _saved_progress(self) -> Progress:
        return Progress(self._progress.train_calls, self._progress.skipped_in_a_row)

    def written(self) -> bool:
        """See `PolicyWorker.checkpoint_written`."""
        return self._save is None or self._save.written

    def finish(self) -> None:
        """See `PolicyWorker.finish_checkpoint`."""
        save, self._save = self._save, None
        if save is not None:
            save.finish()

    def abandon(self) -> None:
        """Discard an unfinished save and remove its files. No collective."""
        save, self._save = self._save, None
        if save is not None:
            save.abandon()

    # -- reading ------------------------------------------------------------------------------------------------------

    def load(self, weights_path: str, optimizer_path: str | None) -> None:
        """See `PolicyWorker.load_checkpoint`."""
        self.finish()
        engine, optimizer = self.engine, optimizer_path is not None
        # check everything before anything changes
        progress = None if optimizer_path is None else read_progress(optimizer_path)
        run_on_all_ranks(engine.context, partial(self.check, weights_path, optimizer_path))
        self._residency.onload(*_parts(optimizer_path))
        native = is_native(weights_path)
        if native:
            files = native_files(weights_path, self._backend, optimizer=optimizer)
            engine.load_native(files, optimizer=optimizer)
        else:
            self._weights.read(weights_path)
        self._progress.weights_version += 1
        if optimizer_path is not None and progress is not None:
            if not native:
                engine.load_moments(SavedMoments(optimizer_path))
            self.restore_progress(progress)
            restore_random_states(optimizer_path, engine.context, engine.device)

    def restore_progress(self, saved: Progress) -> None:
        """Resume the counters of the schedule and of skipped steps."""
        self._progress.train_calls, self._progress.skipped_in_a_row = saved.train_calls, saved.skipped_in_a_row

    def check(self, *folders: str | None) -> None:
        """Raise a `DataError` if files in `folders` are missing or damaged. Each rank reads its share of them."""
        share = (self.engine.context.rank, self.engine.context.world_size)
        for folder in filter(None, folders):
            check_files(folder, required=is_sharded(folder) or is_native(folder), share=share)


def _parts(optimizer_path: str | None) -> tuple[Part, ...]:
    return ("model",) if optimizer_path is None else ("model", "optimizer")
