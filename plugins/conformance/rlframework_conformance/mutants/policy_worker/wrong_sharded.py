"""Violations of contract 5 in sharded checkpoints, and in checkpoints of other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlframework.base.errors import WriteError
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, in_service

RESUMES = "test_training_goes_on_to_the_bit_from_pieces"
SAME = "test_both_forms_hold_the_same_numbers"
BESIDE = "test_saving_beside_training_is_saving_before_it"


def _broken_sharded_state(change: Callable[[Any], Any]) -> Any:
    """Break `sharded_state`: it returns `change(state)`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def sharded_state(self) -> Any:
                return change(super().sharded_state())

        return Broken

    return break_it


def _without_second_moments(state: Any) -> Any:
    moments = [
        replace(shard, local=torch.zeros_like(shard.local)) if shard.name.startswith("exp_avg_sq.") else shard
        for shard in state.moments
    ]
    return replace(state, moments=moments)


def _with_exchanged_offsets(state: Any) -> Any:
    """Exchange the offsets of the two halves of each weight, so the shards still cover it."""

    def moved(shard: Any) -> Any:
        if not shard.shape or 2 * shard.local.shape[0] != shard.shape[0]:
            return shard
        return replace(shard, offset=(0 if shard.offset[0] else shard.local.shape[0], *shard.offset[1:]))

    return replace(state, weights=[moved(shard) for shard in state.weights])


shards_without_second_moments = mutant(
    "pieces_without_second_moments", "The shards of the second moments are saved as zeros.", RESUMES, SAME
)(_broken_sharded_state(_without_second_moments))
shards_without_steps = mutant(
    "pieces_without_steps", "The shards are saved with an optimizer step count of 0.", RESUMES, SAME
)(_broken_sharded_state(lambda state: replace(state, steps=dict.fromkeys(state.steps, 0))))
shards_elsewhere = mutant(
    "pieces_elsewhere", "The shards are saved with each other's offsets.", SAME, layout=Layout(data=2)
)(_broken_sharded_state(_with_exchanged_offsets))


@mutant(
    "asynchronous_is_later",
    "An asynchronous save writes the state at the time it finishes, not at the call.",
    RESUMES,
    BESIDE,
)
def asynchronous_is_later(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        later: tuple[str, ...] = ()

        def save_checkpoint(self, *args: Any, asynchronous: bool = False, **kwargs: Any) -> None:
            if asynchronous:
                self.later = (kwargs["weights_path"], kwargs["optimizer_path"])
            else:
                super().save_checkpoint(*args, **kwargs)

        def finish_checkpoint(self) -> None:
            paths, self.later = self.later, ()
            if paths:
                super().save_checkpoint(*paths, form="sharded")
            super().finish_checkpoint()

    return Broken


@mutant(
    "moments_of_one_layout",
    "Resuming with another number of workers drops the optimizer state.",
    "test_checkpoints_go_on_under_other_layouts",
)
def moments_of_one_layout(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
            from safetensors.torch import load_file

            if optimizer_path is not None:
                states = load_file(Path(optimizer_path) / "random.safetensors")
                if sum(name.startswith("cpu.") for name in states) != self.engine.context.world_size:
                    optimizer_path = None
            super().load_checkpoint(weights_path, optimizer_path)

    return Broken


@mutant("without_checksums", "The checksums of a checkpoint are not verified.", "test_damaged_pieces_are_refused")
@in_service("checkpoints_class")
def without_checksums(checkpoints_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(checkpoints_class):  # type: ignore[misc]
        def check(self, *folders: str | None) -> None:
            return

    return Broken


@mutant(
    "failed_save_is_silent",
    "A failed checkpoint save raises no error.",
    "test_a_save_that_cannot_be_written_is_reported",
)
def failed_save_is_silent(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().save_checkpoint(*args, **kwargs)
            except WriteError:
                return

    return Broken
