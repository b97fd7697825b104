"""Violations of contract 5 in checkpoints in the engine's native format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, in_service

RESUMES = "test_training_goes_on_to_the_bit_from_native_files"
WEIGHTS = "test_native_weights_are_those_that_are_saved"
WHOLE = "test_native_files_are_whole_or_refused"


def _copied(moments: Any) -> Any:
    return replace(moments, exp_avg=moments.exp_avg.clone(), exp_avg_sq=moments.exp_avg_sq.clone())


@mutant("native_without_optimizer", "The optimizer state in native files is not loaded.", RESUMES)
@in_engine
def native_without_optimizer(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def load_native(self, folder: Path, *, optimizer: bool) -> None:
            fresh = {name: _copied(moments) for name, moments in self.gather_moments()} if optimizer else {}
            super().load_native(folder, optimizer=optimizer)
            if optimizer:
                self.load_moments(fresh)

    return Broken


@mutant("native_without_progress", "The schedule restarts after resuming from native files.", RESUMES)
def native_without_progress(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
            super().load_checkpoint(weights_path, optimizer_path)
            self.progress.train_calls = 0

    return Broken


@mutant("native_stays_as_built", "Loading only the weights from native files has no effect.", WEIGHTS)
@in_engine
def native_stays_as_built(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def load_native(self, folder: Path, *, optimizer: bool) -> None:
            before = self.snapshot()
            super().load_native(folder, optimizer=optimizer)
            if not optimizer:
                self.restore(before)

    return Broken


@mutant("native_unchecked", "The checksums of native files are not verified.", WHOLE)
@in_service("checkpoints_class")
def native_unchecked(checkpoints_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(checkpoints_class):  # type: ignore[misc]
        def check(self, *folders: str | None) -> None:
            return

    return Broken
