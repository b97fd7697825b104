"""Violations of contract 4: read-only operations that change state."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from rlframework.policy.reference import SnapshotReference
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import (
    change_weights,
    in_engine,
    optimizer_of,
    to_bfloat16,
)


@mutant(
    "evaluation_steps", "An evaluation takes an optimizer step.", "test_evaluating_gives_the_loss_and_changes_nothing"
)
def evaluation_steps(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None) -> Any:
            result = super().train(data, loss_fn, False, gbs, mbs)
            return {**result, "grad_norm": None} if eval_mode else result

    return Broken


@mutant(
    "evaluation_moves_the_schedule",
    "An evaluation advances the learning-rate schedule.",
    "test_evaluating_gives_the_loss_and_changes_nothing",
)
def evaluation_moves_the_schedule(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None) -> Any:
            result = super().train(data, loss_fn, eval_mode, gbs, mbs)
            self.progress.train_calls += eval_mode
            return result

    return Broken


@mutant(
    "scoring_rounds_weights",
    "Scoring rounds the weights to bfloat16.",
    "test_scoring_changes_nothing",
    "test_scoring_is_with_the_weights_of_now",
)
def scoring_rounds_weights(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            scored = super().get_logprobs(*args, **kwargs)
            change_weights(self.engine, to_bfloat16)
            return scored

    return Broken


@mutant(
    "scores_from_a_cache",
    "Scoring returns cached log-probabilities from before the last step.",
    "test_scoring_is_with_the_weights_of_now",
)
def scores_from_a_cache(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, "cached"):
                self.cached = super().get_logprobs(*args, **kwargs)
            return self.cached

    return Broken


@mutant("data_changed_in_place", "Training clears the masks of the caller's batch.", "test_data_is_not_changed")
def data_changed_in_place(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().train(data, *args, **kwargs)
            data["token_mask"].zero_()
            return result

    return Broken


@mutant(
    "reference_follows",
    "The reference model is updated at each step.",
    "test_the_reference_is_the_model_of_the_start",
)
def reference_follows(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            result = super().train(*args, **kwargs)
            self.scoring.reference = SnapshotReference(self.engine)
            return result

    return Broken


MOVES = "test_the_reference_moves_toward_the_policy"


@mutant("reference_never_moves", "`sync_reference` does nothing.", MOVES)
def reference_never_moves(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def sync_reference(self, alpha: float) -> None:
            pass

    return Broken


@mutant("reference_keeps_the_share_of_the_policy", "`sync_reference` mixes with alpha and 1 - alpha swapped.", MOVES)
@in_engine
def reference_keeps_the_share_of_the_policy(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def mix(self, snapshot: Any, other: Any, alpha: float) -> None:
            super().mix(snapshot, other, 1 - alpha if alpha < 1 else alpha)

    return Broken


@mutant("policy_moves_with_the_reference", "`sync_reference` leaves the mixed weights in the policy.", MOVES)
def policy_moves_with_the_reference(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def sync_reference(self, alpha: float) -> None:
            super().sync_reference(alpha)
            self.engine.restore(self.scoring.reference.weights)

    return Broken


@mutant(
    "reference_stays_after_an_exception",
    "An exception inside `use_reference_model` leaves the reference weights in place.",
    "test_the_reference_gives_way_after_an_exception",
)
def reference_stays_after_an_exception(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        @contextmanager
        def use_reference_model(self) -> Any:
            current = self.engine.snapshot()
            self.engine.restore(self.scoring.reference.weights)
            yield
            self.engine.restore(current)

    return Broken


@mutant(
    "swap_forgets_moments",
    "Switching to the reference model discards the optimizer's moments.",
    "test_training_goes_on_after_the_reference",
)
def swap_forgets_moments(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        @contextmanager
        def use_reference_model(self) -> Any:
            with super().use_reference_model():
                yield
            optimizer_of(self.engine).state.clear()

    return Broken


@mutant("reseeds", "The engine seeds the process-wide random state.", "test_random_state_of_the_caller_is_left_alone")
@in_engine
def reseeds(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            torch.manual_seed(0)
            super().build(init_optimizer=init_optimizer)

    return Broken


@mutant(
    "preparing_rounds_weights",
    "`prepare_for_training` rounds the weights to bfloat16.",
    "test_preparing_changes_nothing",
)
def preparing_rounds_weights(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
            moved = super().prepare_for_training(*args, **kwargs)
            change_weights(self.engine, to_bfloat16)
            return moved

    return Broken


@mutant(
    "reference_at_temperature_one",
    "The reference is scored at temperature 1, the policy at the sampling temperature.",
    "test_the_reference_is_scored_like_the_policy",
)
def reference_at_temperature_one(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        @contextmanager
        def use_reference_model(self) -> Any:
            with super().use_reference_model():
                configured, self.scoring.temperature = self.scoring.temperature, 1.0
                try:
                    yield
                finally:
                    self.scoring.temperature = configured

    return Broken
