"""Tensor and sequence parallelism, where each rank has a shard of the weights: violations of contracts 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.policy.engine import Engine
from rlframework.policy.head.vocabulary import VocabularyShard
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import STATE, changed_updates, head_of
from rlframework_conformance.mutants.policy_worker.measured_gradients import SHARDS, around_measured_step, total_norm
from rlframework_conformance.mutants.policy_worker.training import clips_own_shards

TENSOR = Layout(tensor=2)
SEQUENCE = Layout(tensor=2, sequence=True)


@mutant(
    "padded_vocabulary_in_the_softmax",
    "Rows that pad the vocabulary to a multiple of the ranks take part in the softmax.",
    layout=TENSOR,
)
@around(Engine.build)
def _padded_vocabulary(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    head = head_of(engine)
    shard, sound = head.shard, head.values
    if dist.get_rank(shard.group) == dist.get_world_size(shard.group) - 1:  # the last rank has a row of zeros more
        head.shard = replace(shard, rows=shard.rows + 1)
        head.values = lambda request, rows, weight, *others: sound(
            request, rows, torch.nn.functional.pad(weight, (0, 0, 0, 1)), *others
        )


@mutant(
    "head_gradient_of_own_rows", "Hidden states get the gradient of this rank's rows of the head only.", layout=TENSOR
)
@around(Engine.build)
def _head_gradient_of_own_rows(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    VocabularyShard.with_summed_gradient = lambda self, hidden: hidden  # type: ignore[method-assign]


@mutant(
    "copied_weights_counted_twice",
    "The gradient norm counts the weights of norms, which are replicated, once per rank.",
    layout=TENSOR,
    needs=STATE,
)
@around_measured_step
def _copied_weights_counted_twice(call: Any, engine: Any, max_grad_norm: Any, lr: float) -> Any:
    whole = total_norm(engine.gradients.values())
    copied = total_norm(gradient for name, gradient in engine.gradients.items() if "norm" in name)
    factor = math.hypot(whole, copied) / whole if whole else 1.0
    norm, skipped = call(None if max_grad_norm is None else max_grad_norm / factor, lr)
    return norm * factor, skipped


norm_of_own_part = mutant(
    "norm_of_own_part", "Each rank clips by the norm of its own shard of the weights.", layout=TENSOR, needs=SHARDS
)(clips_own_shards)


def _half_the_update(*fragments: str) -> Callable[[Any], Any]:
    """Halve the updates of the weights whose names contain one of the `fragments`."""
    return changed_updates(
        lambda name, before, after: (before + after) / 2 if any(each in name for each in fragments) else after
    )


norms_averaged_along_the_sequence = mutant(
    "norms_averaged_along_the_sequence",
    "The gradient of a norm is averaged over the shards of the sequence, not summed.",
    layout=SEQUENCE,
    needs=STATE,
)(_half_the_update("norm"))

norms_of_own_heads = mutant(
    "norms_of_own_heads",
    "The gradient of a norm shared by all attention heads covers only one rank's heads.",
    layout=TENSOR,
    needs=STATE,
)(_half_the_update("q_norm", "k_norm"))


@mutant(
    "tied_head_learns_nothing", "A tied weight gets a gradient from the embedding but not from the head.", layout=TENSOR
)
@around(Engine.build)
def _tied_head_learns_nothing(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    head = head_of(engine)
    sound = head.values
    if "lm_head.weight" not in engine.weight_specs():
        head.values = lambda request, rows, weight, *others: sound(request, rows, weight.detach(), *others)


@mutant("part_saved_as_whole", "A sharded matrix is saved as repeated copies of one rank's shard.", layout=TENSOR)
@around(Engine.gather_weights)
def _part_saved_as_whole(call: Any, engine: Any, names: Any) -> Iterator[tuple[str, Tensor]]:
    for name, weight in call(names):
        half = weight[: weight.shape[0] // 2]
        yield name, torch.cat((half, half)) if name.endswith("q_proj.weight") else weight
