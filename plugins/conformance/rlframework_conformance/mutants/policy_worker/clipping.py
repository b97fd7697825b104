"""Violations of contract 3: clipping by another norm than that of the whole gradient, or where nothing is to clip."""

from __future__ import annotations

import math
from typing import Any

from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import change_weights, gradients_of, in_engine
from rlframework_conformance.mutants.policy_worker.measured_gradients import (
    SHARDS,
    measuring,
    norm_of_own_shards,
    total_norm,
)
from rlframework_conformance.mutants.policy_worker.training import after_the_step, before_the_step, scale_gradients

clipping_omitted = mutant(
    "clipping_left_out",
    "The gradient is never clipped.",
    "test_clipping_is_of_the_whole_gradient",
)(before_the_step(lambda worker, limit: None))


@in_engine
def clips_own_shards(engine_class: Any) -> Any:
    """Clip each rank's shards of the gradient by their own norm. Needs `SHARDS`."""

    class Broken(measuring(engine_class)):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            own = norm_of_own_shards(self)
            if max_grad_norm is None or own <= max_grad_norm:
                return super().clip_and_step(None, lr)
            return super().clip_and_step(total_norm(self.gradients.values()) * max_grad_norm / own, lr)

    return Broken


clip_per_rank = mutant(
    "clip_per_rank",
    "Each rank clips its shard of the gradient by the norm of that shard.",
    "test_clipping_is_of_the_whole_gradient",
    layout=Layout(data=2),
    needs=SHARDS,
)(clips_own_shards)


def _rescale_to_the_limit(worker: Any, limit: Any) -> Any:
    if limit is not None and (norm := total_norm(gradients_of(worker))):
        scale_gradients(worker, limit / norm)
    return limit


gradient_scaled_up = mutant(
    "gradient_scaled_up",
    "Gradients are rescaled to the clipping limit even when they are smaller.",
    "test_a_gradient_within_the_limit_is_left_alone",
)(before_the_step(_rescale_to_the_limit))


def _clip_the_norm(worker: Any, norm: float, skipped: bool, limit: float | None) -> tuple[float, bool]:
    return norm if limit is None else min(norm, limit), skipped


norm_after_clipping = mutant(
    "norm_after_clipping",
    "The reported gradient norm is the one after clipping.",
    "test_clipping_is_of_the_whole_gradient",
    "test_twenty_steps_end_at_the_oracles_weights",
)(after_the_step(_clip_the_norm))


def _divide_by_the_norm(worker: Any, norm: float, skipped: bool, limit: float | None) -> tuple[float, bool]:
    if norm == 0.0:
        change_weights(worker, lambda weight: weight * math.nan)
    return norm, skipped


clipping_divides_by_zero = mutant(
    "clipping_divides_by_zero",
    "Clipping divides the gradient by its norm, so a gradient of 0 makes the weights NaN.",
    "test_a_gradient_of_zero_is_an_ordinary_step",
)(after_the_step(_divide_by_the_norm))
