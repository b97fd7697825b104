"""Offloading, onloading and running without an optimizer: violations of contracts 2 and 4."""

from __future__ import annotations

from typing import Any

from rlframework_conformance.measure import MutantNotApplicable
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, optimizer_of

_MOVING = "test_moving_away_and_back_changes_nothing"


@mutant("moments_left_behind", "The optimizer's state is not onloaded again.", _MOVING)
def moments_left_behind(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def offload_after_refit(self) -> Any:
            moved = super().offload_after_refit()
            optimizer_of(self.engine).state.clear()
            return moved

    return Broken


@mutant("weights_of_before_come_back", "Onloading restores the copy made by the first offload.", _MOVING)
def weights_of_before_come_back(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def offload_after_refit(self) -> Any:
            self.__dict__.setdefault("copy", self.engine.snapshot())
            moved = super().offload_after_refit()
            self.engine.restore(self.copy)
            return moved

    return Broken


@mutant("moved_bytes_not_told", "The transitions do not report how many bytes they moved.", _MOVING)
@in_engine
def moved_bytes_not_told(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def move(self, *args: Any, **kwargs: Any) -> int:
            super().move(*args, **kwargs)
            return -1

    return Broken


@mutant(
    "offloaded_weights_stay",
    "The step updates a copy on the device; the weights in CPU memory stay unchanged.",
    "test_what_lies_in_cpu_memory_learns_alike",
)
@in_engine
def offloaded_weights_stay(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: float | None, lr: float) -> Any:
            before = self.snapshot()
            found = super().clip_and_step(max_grad_norm, lr)
            if self.config.offload.parameters:
                self.restore(before)
            return found

    return Broken


@mutant(
    "evaluation_wants_an_optimizer",
    "Evaluation reads the learning rate from the optimizer and so requires one.",
    "test_evaluating_needs_no_optimizer",
)
def evaluation_wants_an_optimizer(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            try:
                optimizer_of(self.engine)
            except MutantNotApplicable as error:
                raise AttributeError("optimizer") from error
            return super().train(*args, **kwargs)

    return Broken
