"""The gradient of an engine by the names of its weights, wherever the engine keeps it.

It is read from the first moments, which a step at a learning rate of 0 changes, and which are then put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlframework.plugins.types import Capability
from rlframework.policy.engine import Moments, WeightSpec
from rlframework_conformance.measure import MutantNotApplicable
from rlframework_conformance.mutants.policy_worker.engine_access import STATE

SHARDS = STATE | {Capability.SHARDED_CHECKPOINTS}
"""Capabilities that the engine must declare for `norm_of_own_shards`."""


def measuring(engine_class: Any) -> Any:
    """Return the class with an attribute `gradients`: those of the last forward and backward, whole, by name.

    Needs `STATE`.
    """

    class Measuring(engine_class):  # type: ignore[misc]
        gradients: Mapping[str, Tensor]

        def forward_backward(self, *args: Any, forward_only: bool) -> Any:
            results = super().forward_backward(*args, forward_only=forward_only)
            if forward_only:
                return results
            self.gradients = _measured(self, super().clip_and_step)
            return super().forward_backward(*args, forward_only=False)  # the step has used up the gradients

    return Measuring


def total_norm(gradients: Iterable[Tensor]) -> float:
    """Return the L2 norm of all `gradients`."""
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def norm_of_own_shards(engine: Any) -> float:
    """Return the norm of the measured gradients of the weights that this rank has. Needs `SHARDS`.

    Raises `MutantNotApplicable` if it has all weights whole.
    """
    shards = engine.sharded_state().weights
    if sum(shard.local.numel() for shard in shards) == sum(map(_size, engine.weight_specs().values())):
        raise MutantNotApplicable("each rank has all weights in this layout, so its own norm is that of the whole")
    return total_norm(
        engine.gradients[shard.name][
            tuple(slice(first, first + size) for first, size in zip(shard.offset, shard.local.shape, strict=True))
        ]
        for shard in shards
        if shard.name in engine.gradients
    )


def _size(spec: WeightSpec) -> int:
    return math.prod(spec.shape)


def _measured(engine: Any, step: Callable[[None, float], Any]) -> dict[str, Tensor]:
    beta, before = engine.config.optimizer.betas[0], {name: _copy(one) for name, one in engine.gather_moments()}
    step(None, 0.0)
    found = {name: (one.exp_avg - beta * before[name].exp_avg) / (1 - beta) for name, one in engine.gather_moments()}
    engine.load_moments(before)
    return found


def _copy(moments: Moments) -> Moments:
    return replace(moments, exp_avg=moments.exp_avg.clone(), exp_avg_sq=moments.exp_avg_sq.clone())
