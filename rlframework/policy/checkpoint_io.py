"""The worker's checkpoint calls: Hugging Face directories, and the state that training resumes from.

`rlframework.policy.checkpoint` describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframework.base.errors import ConfigError, DataError, NotSupported
from rlframework.base.files import remove_temporary, require_space, writing
from rlframework.policy.checkpoint.manifest import check_files, reading, write_save_id
from rlframework.policy.checkpoint.pretrained import (
    PendingSave,
    save_native,
    write_files,
    write_from_rank_0,
    write_tensors,
)
from rlframework.policy.checkpoint.saved import (
    FIRST,
    SECOND,
    TRAINING,
    SavedMoments,
    is_native,
    is_sharded,
    native_files,
)
from rlframework.policy.engine import Engine, Moments
from rlframework.policy.scoring import BaseReference, SnapshotReference, require_copy
from rlframework.policy.shared_state import Part, Residency, TrainingProgress
from rlframework.policy.trained_weights import TrainedWeights, open_saved
from rlframework.workers.process_groups import run_on_all_ranks

if TYPE_CHECKING:
    from rlframework.policy.checkpoint.sharded import CheckpointSave

FORMS = ("portable", "sharded", "native")
FORMAT = 1
"""Version of `training.json`."""
RANDOM = "random.safetensors"


@dataclass
class CheckpointIO:
    """Writes and reads checkpoints, which are marked with the name `backend`. At most one save is in progress."""

    engine: Engine
    residency: Residency
    weights: TrainedWeights
    progress: TrainingProgress
    backend: str
    has_optimizer: bool
    reference: SnapshotReference | BaseReference | None = None
    _save: CheckpointSave | None = None

    def save(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        *,
        form: str = "portable",
        asynchronous: bool = False,
        reference_path: str | None = None,
    ) -> None:
        """See `PolicyWorker.save_checkpoint`."""
        self.residency.require_policy("save_checkpoint")
        if form not in FORMS:
            raise ConfigError(f"unknown checkpoint form {form!r}; choose one of {', '.join(FORMS)}")
        if asynchronous and form != "sharded":
            raise ConfigError(f"a {form} checkpoint cannot be written asynchronously; use the form sharded")
        if optimizer_path is not None and not self.has_optimizer:
            raise NotSupported("this worker was built without an optimizer, so it has no optimizer state to save")
        self._require_form(form)
        self.finish()  # the previous one
        engine = self.engine
        if engine.context.rank == 0:  # what interrupted saves left
            for path in map(Path, filter(None, (weights_path, optimizer_path, reference_path))):
                remove_temporary(path.parent, path.name)
        copies = (1 if optimizer_path is None else 3) + (reference_path is not None)  # two moments
        size = self.weights.trained_bytes() * copies
        # the first rank checks for all
        run_on_all_ranks(engine.context, partial(require_space, weights_path, 0 if engine.context.rank else size))
        if form != "sharded":  # shards are written from whichever device they are on
            self.residency.onload(*_parts(optimizer_path))
        with PendingSave() as save:
            if reference_path is not None:
                self._save_reference(reference_path, save, sharded=form == "sharded")
            self._save_form(form, weights_path, optimizer_path, asynchronous, save)
        if tokenizer_path is not None and engine.context.rank == 0:
            with writing(tokenizer_path):
                engine.tokenizer.save_pretrained(tokenizer_path)
        if not asynchronous:
            self.finish()

    def _save_form(self, form: str, weights: str, optimizer: str | None, asynchronous: bool, save: PendingSave) -> None:
        engine = self.engine
        if form == "sharded":
            self._start_sharded(weights, optimizer, asynchronous, save.id)
            return
        if form == "portable":
            moments = engine.gather_moments()  # raises before anything is written
            self.weights.write(weights, save)
        else:
            moments, has_optimizer = iter(()), optimizer is not None
            facts = {"backend": self.backend, "workers": engine.context.world_size, "optimizer": has_optimizer}
            write = partial(engine.save_native, optimizer=has_optimizer)
            beside = partial(self._write_config, save=save.id)
            save_native(weights, engine.context, beside=beside, write=write, facts=facts)
        if optimizer is not None:
            self._save_optimizer(optimizer, moments, save)

    def _require_form(self, form: str) -> None:
        """Raise `NotSupported` for another form of adapters than the portable one."""
        if form != "portable" and self.engine.config.lora is not None:
            raise NotSupported("adapters are saved in the portable form only; set checkpoints.format to portable")

    def _save_reference(self, path: str, save: PendingSave, *, sharded: bool) -> None:
        """Write the weights of the reference; complete when the call returns, as the model has them only within it."""
        reference = require_copy(self.reference, "save_checkpoint with a reference_path")
        self.residency.onload("model")
        with reference.use():
            if not sharded:
                self.weights.write(path, save)
                return
            self._start_sharded(path, None, False, save.id)
            self.finish()

    def _save_optimizer(self, path: str, moments: Iterator[tuple[str, Moments]], save: PendingSave) -> None:
        states, steps = self._random_states(), dict[str, int]()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, state in moments:
                steps[name] = state.steps
                yield FIRST + name, state.exp_avg
                if state.exp_avg_sq.numel():
                    yield SECOND + name, state.exp_avg_sq

        def write(folder: Path) -> None:
            write_tensors(folder, tensors())
            self._write_training(folder, steps, states)

        write_from_rank_0(path, self.engine.context.rank, moments, write, save=save)

    def _start_sharded(self, weights_path: str, optimizer_path: str | None, asynchronous: bool, save: str) -> None:
        from rlframework.policy.checkpoint.sharded import CheckpointSave, DirectoryPlan

        context, state = self.engine.context, self.engine.sharded_state()
        plans = [DirectoryPlan(weights_path, state.weights, partial(self._write_config, save=save))]
        if optimizer_path is not None:
            parts = run_on_all_ranks(context, lambda: state.steps)
            steps = {name: count for part in parts for name, count in part.items()}
            states = self._random_states()

            def write(folder: Path) -> None:
                write_save_id(folder, save)
                self._write_training(folder, steps, states)

            plans.append(DirectoryPlan(optimizer_path, state.moments, write))
        self._save = CheckpointSave(plans, context, asynchronous=asynchronous)

    def _write_config(self, folder: Path, save: str) -> None:
        write_save_id(folder, save)
        write_files(folder, self.weights.model_files)

    def _write_training(self, folder: Path, steps: Mapping[str, int], states: Mapping[str, Tensor]) -> None:
        save_file(dict(states), folder / RANDOM)
        facts = {
            "format": FORMAT,
            "optimizer": self.engine.config.optimizer.name,
            "steps": dict(steps),
            "train_calls": self.progress.train_calls,
            "skipped_in_a_row": self.progress.skipped_in_a_row,
            "backend": self.backend,
            "versions": {"torch": torch.__version__},
        }
        (folder / TRAINING).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def _random_states(self) -> dict[str, Tensor]:
        """The random states of all workers, by kind and rank. Collective."""
        context, device = self.engine.context, self.engine.device
        own = {f"cpu.{context.rank}": torch.get_rng_state()}
        if device.type == "cuda":
            own[f"cuda.{context.rank}"] = torch.cuda.get_rng_state(device)
        return {name: state for states in run_on_all_ranks(context, lambda: own) for name, state in states.items()}

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

    def load(self, weights_path: str, optimizer_path: str | None = None, reference_path: str | None = None) -> None:
        """See `PolicyWorker.load_checkpoint`."""
        self.residency.require_policy("load_checkpoint")
        self.finish()
        engine, optimizer = self.engine, optimizer_path is not None
        # check everything before anything changes
        native = is_native(weights_path)
        self._require_form("native" if native else "portable")
        optimizer_name = engine.config.optimizer.name
        training = None if optimizer_path is None else _read_training(optimizer_path, optimizer_name)
        run_on_all_ranks(engine.context, partial(self.check, weights_path, optimizer_path, reference_path))
        self.residency.onload(*_parts(optimizer_path))
        if reference_path is not None:
            reference = require_copy(self.reference, "load_checkpoint with a reference_path")
            self.weights.read(reference_path)  # the policy's weights are read after it
            reference.take()
        if native:
            engine.load_native(native_files(weights_path, self.backend, optimizer=optimizer), optimizer=optimizer)
        else:
            self.weights.read(weights_path)
        self.progress.weights_version += 1
        if optimizer_path is not None and training is not None:
            saved, steps = training
            if not native:
                engine.load_moments(SavedMoments(open_saved(optimizer_path), steps, optimizer_name))
            self.progress.train_calls, self.progress.skipped_in_a_row = saved.train_calls, saved.skipped_in_a_row
            self._restore_random_states(Path(optimizer_path, RANDOM))

    def check(self, *folders: str | None) -> None:
        """Raise a `DataError` if files in `folders` are missing or damaged. Each rank reads its share of them."""
        share = (self.engine.context.rank, self.engine.context.world_size)
        for folder in filter(None, folders):
            check_files(folder, required=is_sharded(folder) or is_native(folder), share=share)

    def _restore_random_states(self, path: Path) -> None:
        """Restore this rank's random states, if the number of ranks is that of the save."""
        rank, device = self.engine.context.rank, self.engine.device
        with reading(path):
            states = load_file(path)
        if sum(name.startswith("cpu.") for name in states) == self.engine.context.world_size:
            torch.set_rng_state(states[f"cpu.{rank}"])
            if device.type == "cuda" and f"cuda.{rank}" in states:
                torch.cuda.set_rng_state(states[f"cuda.{rank}"], device)


def _parts(optimizer_path: str | None) -> tuple[Part, ...]:
    return ("model",) if optimizer_path is None else ("model", "optimizer")


def _read_training(folder: str, optimizer: str) -> tuple[TrainingProgress, dict[str, int]]:
    """Read `training.json`: the progress, and the steps by weight; a `DataError` if it is of another optimizer."""
    path = Path(folder, TRAINING)
    with reading(path):
        facts = json.loads(path.read_text(encoding="utf-8"))
        version, saved = facts["format"], facts["optimizer"]
        progress = TrainingProgress(int(facts["train_calls"]), int(facts["skipped_in_a_row"]))
        steps = {str(name): int(count) for name, count in facts["steps"].items()}
    if version != FORMAT:
        raise DataError(f"{path} has format {version!r}, but this version reads {FORMAT}")
    if saved != optimizer:
        raise DataError(
            f"{path} has the state of the optimizer {saved!r}, but policy.optimizer.name is {optimizer}; set it "
            f"to {saved}, or start a new run from the weights"
        )
    return progress, steps
