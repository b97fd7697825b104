"""Bugs against contract 4: looking that leaves a trace."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from rlframework.conformance.mutants.mutant import mutant
from rlframework.conformance.mutants.policy_worker.engine_access import change_weights, optimizer_of, to_bfloat16


@mutant(
    "evaluation_steps", "an evaluation takes an optimizer step", "test_evaluating_gives_the_loss_and_changes_nothing"
)
def evaluation_steps(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None) -> Any:
            result = super().train(data, loss_fn, False, gbs, mbs)
            return {**result, "grad_norm": None} if eval_mode else result

    return Broken


@mutant(
    "evaluation_moves_the_schedule",
    "an evaluation counts as a call of the schedule",
    "test_evaluating_gives_the_loss_and_changes_nothing",
)
def evaluation_moves_the_schedule(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None) -> Any:
            result = super().train(data, loss_fn, eval_mode, gbs, mbs)
            self._train_calls += eval_mode
            return result

    return Broken


@mutant(
    "scoring_rounds_weights",
    "weights that were moved for scoring come back through bfloat16",
    "test_scoring_changes_nothing",
    "test_scoring_is_with_the_weights_of_now",
)
def scoring_rounds_weights(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            scored = super().get_logprobs(*args, **kwargs)
            change_weights(self, to_bfloat16)
            return scored

    return Broken


@mutant(
    "scores_from_a_cache",
    "the same batch gets the scores that it got before the step",
    "test_scoring_is_with_the_weights_of_now",
)
def scores_from_a_cache(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, "cached"):
                self.cached = super().get_logprobs(*args, **kwargs)
            return self.cached

    return Broken


@mutant("data_changed_in_place", "masks of the caller's batch are cleared while training", "test_data_is_not_changed")
def data_changed_in_place(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().train(data, *args, **kwargs)
            data["token_mask"].zero_()
            return result

    return Broken


@mutant(
    "reference_follows",
    "the reference is taken anew at each step",
    "test_the_reference_is_the_model_of_the_start",
)
def reference_follows(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            result = super().train(*args, **kwargs)
            self._reference = self.snapshot()
            return result

    return Broken


@mutant(
    "reference_stays_after_an_exception",
    "an exception inside use_reference_model leaves the reference weights in place",
    "test_the_reference_gives_way_after_an_exception",
)
def reference_stays_after_an_exception(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        @contextmanager
        def use_reference_model(self) -> Any:
            current = self.snapshot()
            self.restore(self._reference)
            yield
            self.restore(current)

    return Broken


@mutant(
    "swap_forgets_moments",
    "putting the reference in throws the optimizer's moments away",
    "test_training_goes_on_after_the_reference",
)
def swap_forgets_moments(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        @contextmanager
        def use_reference_model(self) -> Any:
            with super().use_reference_model():
                yield
            optimizer_of(self).state.clear()

    return Broken


@mutant("reseeds", "the engine seeds the process's random state", "test_random_state_of_the_caller_is_left_alone")
def reseeds(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            torch.manual_seed(0)
            super().build(init_optimizer=init_optimizer)

    return Broken


@mutant("preparing_rounds_weights", "moving to the device and back casts weights", "test_preparing_changes_nothing")
def preparing_rounds_weights(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
            moved = super().prepare_for_training(*args, **kwargs)
            change_weights(self, to_bfloat16)
            return moved

    return Broken


@mutant(
    "reference_at_temperature_one",
    "the reference is scored at temperature 1, the policy at that of sampling",
    "test_the_reference_is_scored_like_the_policy",
)
def reference_at_temperature_one(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        cold = False

        @contextmanager
        def use_reference_model(self) -> Any:
            with super().use_reference_model():
                self.cold = True
                try:
                    yield
                finally:
                    self.cold = False

        def _temperature(self) -> Any:
            return 1.0 if self.cold else super()._temperature()

    return Broken
