"""Access to an engine's module, gradients, optimizer and head, and changes that several mutants make.

The gradient by the names of weights, wherever the engine keeps it, is read from the first moments, which a step at a
learning rate of 0 changes, and which are then put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.plugins.types import Capability
from rlframework.policy.engine import Engine, Moments, WeightSpec
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.microbatches.on_demand import on_host
from rlframework.policy.microbatching import Microbatching
from rlframework_conformance.measure import MutantNotApplicable
from rlframework_conformance.mutants.mutant import around, attribute_of, together

STATE = frozenset({Capability.PORTABLE_OPTIMIZER_STATE})
"""Capabilities that the engine must declare for a mutant that loads whole weights or moments."""


def module_of(engine: Any) -> Any:
    """Return the model that the engine trains: its attribute `model`, or the first that is a module."""
    model = getattr(engine, "model", None)
    return model if isinstance(model, nn.Module) else attribute_of(nn.Module, engine)


def head_of(engine: Any) -> Any:
    """Return the engine's `HeadPatch`; untyped, since mutants replace its methods."""
    return attribute_of(HeadPatch, engine)


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """Return the engine's optimizer."""
    return attribute_of(torch.optim.Optimizer, engine)


def gradients_of(engine: Any) -> Iterator[Tensor]:
    """Yield the gradients of the model, or this rank's shards of them.

    Raises `MutantNotApplicable` if no parameter has one: the backend keeps them elsewhere.
    """
    found = [parameter.grad for parameter in module_of(engine).parameters() if parameter.grad is not None]
    if not found:
        raise MutantNotApplicable("it changes `parameter.grad`, and this backend keeps gradients elsewhere")
    for gradient in found:
        yield gradient.to_local() if hasattr(gradient, "to_local") else gradient


def scale_gradients(engine: Any, factor: float) -> None:
    """Multiply this rank's shards of the gradient by `factor`."""
    for gradient in gradients_of(engine):
        gradient.mul_(factor)


def change_weights(engine: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each shard of the weights by `change(shard)`."""
    engine.restore({name: change(weight) for name, weight in engine.snapshot().items()})


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return copies of all weights, whole. Collective."""
    return {name: weight.clone() for name, weight in engine.gather_weights(engine.weight_specs())}


def to_bfloat16(weight: Tensor) -> Tensor:
    """Return `weight` rounded to bfloat16, in its own dtype."""
    return weight.to(torch.bfloat16).to(weight.dtype)


def changed_updates(change: Callable[[str, Tensor, Tensor], Tensor]) -> Callable[[Any], Any]:
    """Break steps: each weight becomes `change(name, before, after)`, wherever the engine keeps gradients.

    Where the epsilon of AdamW is far above the gradient, the update is in proportion to the gradient, so a part of the
    update is that of a part of the gradient. Needs `STATE`.
    """

    @around(Engine.clip_and_step)
    def clip_and_step(call: Any, engine: Any, *args: Any) -> Any:
        before = whole_weights(engine)
        done = call(*args)
        after = whole_weights(engine)
        engine.load_weights({name: change(name, before[name], weight) for name, weight in after.items()})
        return done

    return clip_and_step


def around_forward(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Callable[[Any], Any]:
    """Decorate `change(engine, keywords)`, which returns the keyword arguments of each forward of the model."""

    @around(Engine.forward_backward)
    def forward_backward(call: Any, engine: Any, *args: Any, **options: Any) -> Any:
        def changed(module: Any, positional: Any, keywords: Any) -> Any:
            return positional, change(engine, keywords)

        handle = module_of(engine).register_forward_pre_hook(changed, with_kwargs=True)
        try:
            return call(*args, **options)
        finally:
            handle.remove()

    return forward_backward


def around_step(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorate `change(step, engine, output, microbatch)`, which runs in place of `step` in training."""

    @around(Engine.forward_backward)
    def forward_backward(call: Any, engine: Any, rows: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
        return call(rows, head, step if forward_only else partial(change, step, engine), forward_only=forward_only)

    return forward_backward


def changed_output(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Break the head: its result `name` becomes `change(result)`, in training and scoring."""

    @around(Engine.forward_backward)
    def forward_backward(call: Any, engine: Any, rows: Any, head: Any, step: Any, **options: Any) -> Any:
        def changed(output: Any, microbatch: Any) -> Any:
            value = getattr(output, name)
            return step(output if value is None else replace(output, **{name: change(value)}), microbatch)

        return call(rows, head, changed, **options)

    return forward_backward


def around_microbatch(change: Callable[[Any, str], None]) -> Callable[[Any], Any]:
    """Decorate `change(microbatch, positions)`, which changes each microbatch of a loss in CPU memory."""

    @around(Microbatching.split)
    def split(call: Any, microbatching: Any, data: Any, positions: str, *how: Any) -> Any:
        microbatches = call(data, positions, *how)
        for microbatch in on_host(microbatches) if positions.startswith("loss") else ():
            change(microbatch, positions)
        return microbatches

    return split


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
