"""Violations of contract 5: training does not resume from the same state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlframework.base.errors import DataError
from rlframework.policy.reference import SnapshotReference
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import (
    change_weights,
    in_engine,
    in_service,
    to_bfloat16,
)

RESUMES = "test_training_goes_on_to_the_bit"
FROM_ANOTHER = "test_a_checkpoint_that_another_program_wrote_goes_on"


def _after_loading(change: Callable[[Any], None]) -> Any:
    """Call `change(worker)` after a checkpoint is loaded."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                super().load_checkpoint(*args, **kwargs)
                change(self)

        return Broken

    return break_it


def _broken_moments(change: Callable[[Any], Any], *, loading: bool) -> Any:
    """Break loading or saving of moments: those of each weight become `change(moments)`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def load_moments(self, moments: Any) -> None:
                changed = {name: change(moments[name]) for name in moments} if loading else moments
                super().load_moments(changed)

            def gather_moments(self) -> Any:
                for name, moments in super().gather_moments():
                    yield name, moments if loading else change(moments)

        return Broken

    return break_it


def _forget_schedule(worker: Any) -> None:
    worker.progress.train_calls = 0


def _reseed(worker: Any) -> None:
    torch.manual_seed(99)


def _forget_skips(worker: Any) -> None:
    worker.progress.skipped_in_a_row = 0


without_schedule = mutant(
    "checkpoint_without_schedule", "The learning-rate schedule restarts after resuming.", RESUMES
)(_after_loading(_forget_schedule))
without_skips = mutant(
    "checkpoint_without_skips",
    "The count of consecutive skipped steps restarts at 0 after resuming.",
    "test_skipped_steps_in_a_row_go_on",
)(_after_loading(_forget_skips))
without_random_state = mutant(
    "checkpoint_without_random_state",
    "Workers draw different random numbers after resuming.",
    "test_random_numbers_go_on",
)(_after_loading(_reseed))
without_second_moments = mutant(
    "checkpoint_without_second_moments",
    "The second moments are not saved.",
    RESUMES,
    "test_moments_are_the_oracles",
)(_broken_moments(lambda saved: replace(saved, exp_avg_sq=torch.zeros_like(saved.exp_avg_sq)), loading=False))
without_steps = mutant(
    "checkpoint_without_steps", "The optimizer's bias correction restarts after resuming.", RESUMES, FROM_ANOTHER
)(_broken_moments(lambda saved: replace(saved, steps=0), loading=True))
moments_in_bfloat16 = mutant(
    "moments_in_bfloat16", "The first moments are saved in bfloat16.", RESUMES, "test_moments_are_the_oracles"
)(_broken_moments(lambda saved: replace(saved, exp_avg=to_bfloat16(saved.exp_avg)), loading=False))


@mutant("rank_zero_loads", "Only rank 0 loads the weights.", RESUMES, FROM_ANOTHER, layout=Layout(data=2))
@in_service("weights_class")
def rank_zero_loads(weights_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(weights_class):  # type: ignore[misc]
        def read(self, path: str) -> None:
            if self.engine.context.rank == 0:
                super().read(path)

    return Broken


@mutant("weights_only", "Resuming loads the weights but no optimizer state.", RESUMES, FROM_ANOTHER)
def weights_only(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
            super().load_checkpoint(weights_path)

    return Broken


@mutant(
    "checkpoint_rounds_weights",
    "Saving a checkpoint rounds the live weights to bfloat16.",
    "test_saving_a_checkpoint_changes_nothing",
)
def checkpoint_rounds_weights(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super().save_checkpoint(*args, **kwargs)
            change_weights(self.engine, to_bfloat16)

    return Broken


@mutant(
    "reference_from_the_checkpoint",
    "The reference model is loaded from the checkpoint.",
    "test_the_reference_is_not_the_checkpoint",
)
def reference_from_the_checkpoint(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super().load_checkpoint(*args, **kwargs)
            self.scoring.reference = SnapshotReference(self.engine)

    return Broken


@mutant(
    "checkpoint_without_moved_reference",
    "A reference that moved starts from the first model again after resuming.",
    "test_a_reference_that_moved_is_saved",
)
def without_moved_reference(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_checkpoint(self, weights_path: str, optimizer_path: Any = None, reference_path: Any = None) -> None:
            super().load_checkpoint(weights_path, optimizer_path)

    return Broken


@mutant("damage_borne", "A checkpoint that cannot be read is silently skipped.", "test_damaged_checkpoints_are_refused")
def damage_borne(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().load_checkpoint(*args, **kwargs)
            except DataError:
                return

    return Broken
