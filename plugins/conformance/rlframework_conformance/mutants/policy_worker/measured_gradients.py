"""The gradient of an engine by the names of its weights, wherever the engine keeps it.

It is read from the first moments, which a step at a learning rate of 0 changes, and which are then put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rlframework.plugins.types import Capability
from rlframework.policy.engine import Engine, Moments, WeightSpec
from rlframework_conformance.measure import MutantNotApplicable
from rlframework_conformance.mutants.mutant import around, together
from rlframework_conformance.mutants.policy_worker.engine_access import STATE

SHARDS = STATE | {Capability.SHARDED_CHECKPOINTS}
"""Capabilities that the engine must declare for `norm_of_own_shards`."""


def around_measured_step(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorate `change(call, engine, max_grad_norm, lr)`, which runs in place of `clip_and_step`.

    `engine.gradients` are those of the last forward and backward, whole, by name. Needs `STATE`.
    """

    @around(Engine.forward_backward)
    def forward_backward(call: Any, engine: Any, *args: Any, **options: Any) -> Any:
        engine.repeat = partial(call, *args, **options)
        return engine.repeat()

    @around(Engine.clip_and_step)
    def clip_and_step(call: Any, engine: Any, *args: Any) -> Any:
        engine.gradients = _measured(engine, call)
        engine.repeat()  # the step has used up the gradients
        return change(call, engine, *args)

    return together(forward_backward, clip_and_step)


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
    beta, before = engine.config.optimizer.betas[0], {name: copy_of(one) for name, one in engine.gather_moments()}
    step(None, 0.0)
    found = {name: (one.exp_avg - beta * before[name].exp_avg) / (1 - beta) for name, one in engine.gather_moments()}
    engine.load_moments(before)
    return found


def copy_of(moments: Moments) -> Moments:
    """Return the moments in memory of their own."""
    return replace(moments, exp_avg=moments.exp_avg.clone(), exp_avg_sq=moments.exp_avg_sq.clone())
