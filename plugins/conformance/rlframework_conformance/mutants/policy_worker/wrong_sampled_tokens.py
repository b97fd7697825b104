"""Violations of contract 11 in the trainer: tokens that the engine did not sample from the policy are learned from."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.interfaces.policy_worker import SAMPLED_NOW
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, in_service

_WITHHELD = "test_a_step_on_other_tokens_than_sampled_is_withheld"


@mutant("bound_after_the_step", "The bound on sampled tokens is looked at after the optimizer step.", _WITHHELD)
@in_service("training_class")
def bound_after_the_step(training_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(training_class):  # type: ignore[misc]
        def global_batch(self, *args: Any) -> Any:
            *others, bound = args
            if bound is not None:
                super().global_batch(*others, None)
            return super().global_batch(*args)

    return Broken


@mutant("withheld_gradient_is_kept", "The gradient of a step that was withheld is part of the next.", _WITHHELD)
@in_engine
def withheld_gradient_is_kept(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        pending = False

        def forward_backward(self, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
            batches = list(microbatches)
            if self.pending and not forward_only:
                batches *= 2
            results = super().forward_backward(batches, head, step, forward_only=forward_only)
            self.pending = not forward_only
            return results[: len(list(microbatches))]

        def clip_and_step(self, *args: Any) -> Any:
            self.pending = False
            return super().clip_and_step(*args)

    return Broken


@mutant(
    "all_tokens_are_compared",
    "Tokens of earlier weights are compared with those that are trained now.",
    "test_tokens_of_other_versions_are_not_compared",
)
@in_service("training_class")
def all_tokens_are_compared(training_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(training_class):  # type: ignore[misc]
        def train(self, data: Any, *args: Any, **options: Any) -> Any:
            if SAMPLED_NOW in data:
                data[SAMPLED_NOW] = torch.ones_like(data[SAMPLED_NOW])
            return super().train(data, *args, **options)

    return Broken
