"""The worker's checkpoint calls: Hugging Face directories, and the state that training resumes from.

`PolicyWorkerBase` derives from `Saving`. The portable form is described in `checkpoint/portable.py`, the sharded one in
`checkpoint/sharded.py`, the engine's own in `checkpoint/native.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlframework.config.policy import PolicyConfig
from rlframework.errors import ConfigError, NotSupported
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.all_ranks import run_on_all_ranks
from rlframework.policy.checkpoint.manifest import check_files
from rlframework.policy.checkpoint.native import native_files, save_native
from rlframework.policy.checkpoint.portable import (
    Progress,
    SavedMoments,
    random_states,
    read_progress,
    require_weights,
    restore_random_states,
    save_optimizer,
    write_training,
)
from rlframework.policy.checkpoint.reader import open_saved
from rlframework.policy.checkpoint.saved import is_native, is_sharded
from rlframework.policy.engine import Engine
from rlframework.policy.model_state import Moments

if TYPE_CHECKING:
    from rlframework.policy.checkpoint.sharded import CheckpointSave

FORMS = ("portable", "sharded", "native")


class Saving(Engine, PolicyWorker, ABC):
    """Writing and reading checkpoints with the primitives of an engine."""

    config: PolicyConfig
    context: WorkerContext
    device: torch.device
    tokenizer: Any
    _has_optimizer: bool
    _train_calls: int
    _skipped_in_a_row: int
    _weights_version: int
    _save: CheckpointSave | None = None
    """The save in progress, if any."""

    # -- writing ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _onload(self, *parts: str) -> dict[str, int]:
        """Onload those of `parts` ("model", "optimizer") that are offloaded, as collectives need them on the device."""

    def save_pretrained(self, path: str) -> None:
        """See `PolicyWorker.save_pretrained`."""
        self._onload("model")
        self._write_weights(path, checksums=False)

    def _write_weights(self, path: str, *, checksums: bool) -> None:
        from rlframework.policy.checkpoint.pretrained import write_pretrained

        weights = self.gather_weights(self.weight_specs())
        if self.context.rank == 0:
            given = self.config
            write_pretrained(
                path, weights, given.model_name, self.tokenizer, given.trust_remote_code, checksums=checksums
            )
        else:
            for _ in weights:
                pass

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        *,
        form: str = "portable",
        asynchronous: bool = False,
    ) -> None:
        """See `PolicyWorker.save_checkpoint`."""
        if form not in FORMS:
            raise ConfigError(f"unknown checkpoint form {form!r}; choose one of {', '.join(FORMS)}")
        if asynchronous and form != "sharded":
            raise ConfigError(f"a {form} checkpoint cannot be written asynchronously; use the form sharded")
        if optimizer_path is not None and not self._has_optimizer:
            raise NotSupported("this worker was built without an optimizer, so it has no optimizer state to save")
        self.finish_checkpoint()  # the previous one
        if form != "sharded":  # shards are written from whichever device they are on
            self._onload("model", *(["optimizer"] if optimizer_path is not None else []))
        if form == "portable":
            self._save_portable(weights_path, optimizer_path)
        elif form == "native":
            self._save_native(weights_path, optimizer_path)
        else:
            self._start_sharded(weights_path, optimizer_path, asynchronous)
        if tokenizer_path is not None and self.context.rank == 0:
            self.tokenizer.save_pretrained(tokenizer_path)
        if not asynchronous:
            self.finish_checkpoint()

    def _save_portable(self, weights_path: str, optimizer_path: str | None) -> None:
        moments: Iterator[tuple[str, Moments]] = self.gather_moments()  # raises before anything is written
        self._write_trained(weights_path)
        if optimizer_path is not None:
            save_optimizer(optimizer_path, moments, self._progress(), self.context, self.device, type(self).__name__)

    def _save_native(self, weights_path: str, optimizer_path: str | None) -> None:
        optimizer = optimizer_path is not None
        facts = {"backend": type(self).__name__, "workers": self.context.world_size, "optimizer": optimizer}
        write = partial(self.save_native, optimizer=optimizer)
        save_native(weights_path, self.context, beside=self._write_config, write=write, facts=facts)
        if optimizer_path is not None:
            progress, backend = self._progress(), type(self).__name__
            save_optimizer(optimizer_path, iter(()), progress, self.context, self.device, backend)

    def _write_trained(self, path: str) -> None:
        """Write what training resumes from, apart from the moments, to the directory `path`."""
        self._write_weights(path, checksums=True)

    def _read_trained(self, path: str) -> None:
        """Load the weights from the directory `path`, in the portable or the sharded form."""
        with open_saved(path) as weights:
            require_weights(weights, self.weight_specs())
            self.load_weights(weights)

    def _start_sharded(self, weights_path: str, optimizer_path: str | None, asynchronous: bool) -> None:
        from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan

        state = self.sharded_state()
        plans = [DirectoryPlan(weights_path, state.weights, self._write_config)]
        if optimizer_path is not None:
            parts = run_on_all_ranks(self.context, lambda: state.steps)
            steps = {name: count for part in parts for name, count in part.items()}
            states, backend = random_states(self.context, self.device), type(self).__name__
            write = partial(write_training, steps=steps, progress=self._progress(), states=states, backend=backend)
            plans.append(DirectoryPlan(optimizer_path, state.moments, write))
        self._save = CheckpointSave(plans, self.context, asynchronous=asynchronous)

    def _write_config(self, folder: Path) -> None:
        from rlframework.policy.checkpoint.pretrained import write_config

        write_config(folder, self.config.model_name, self.tokenizer, self.config.trust_remote_code)

    def _progress(self) -> Progress:
        return Progress(self._train_calls, self._skipped_in_a_row)

    def checkpoint_written(self) -> bool:
        """See `PolicyWorker.checkpoint_written`."""
        return self._save is None or self._save.written

    def finish_checkpoint(self) -> None:
        """See `PolicyWorker.finish_checkpoint`."""
        save, self._save = self._save, None
        if save is not None:
            save.finish()

    def abandon_checkpoint(self) -> None:
        """Discard an unfinished save and remove its files. No collective."""
        save, self._save = self._save, None
        if save is not None:
            save.abandon()

    # -- reading ------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """See `PolicyWorker.load_checkpoint`."""
        self.finish_checkpoint()
        # check everything before anything changes
        progress = None if optimizer_path is None else read_progress(optimizer_path)
        run_on_all_ranks(self.context, partial(self._check, weights_path, optimizer_path))
        self._onload("model", *(["optimizer"] if optimizer_path is not None else []))
        native = is_native(weights_path)
        if native:
            files = native_files(weights_path, type(self).__name__, optimizer=optimizer_path is not None)
            self.load_native(files, optimizer=optimizer_path is not None)
        else:
            self._read_trained(weights_path)
        self._weights_version += 1
        if optimizer_path is not None and progress is not None:
            if not native:
                with SavedMoments(optimizer_path) as moments:
                    self.load_moments(moments)
            self._train_calls, self._skipped_in_a_row = progress.train_calls, progress.skipped_in_a_row
            restore_random_states(optimizer_path, self.context, self.device)

    def _check(self, *folders: str | None) -> None:
        share = (self.context.rank, self.context.world_size)
        for folder in filter(None, folders):
            check_files(folder, required=is_sharded(folder) or is_native(folder), share=share)
