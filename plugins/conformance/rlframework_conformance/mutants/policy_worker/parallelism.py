"""Tensor, sequence, context and expert parallelism: violations of contracts 2, 3 and 5.

Each rank has a shard of the weights, a shard of every sequence, or some of the experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.policy.engine import Engine
from rlframework.policy.head.vocabulary import VocabularyShard
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, before, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import (
    SHARDS,
    STATE,
    around_forward,
    around_measured_step,
    around_step,
    changed_updates,
    head_of,
    module_of,
    total_norm,
)
from rlframework_conformance.mutants.policy_worker.training import clips_own_shards
from rlframework_conformance.mutants.policy_worker.wrong_grouping import scaled

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


def _half_the_update(*fragments: str) -> Callable[[Any], Any]:
    """Halve the updates of the weights whose names contain one of the `fragments`."""
    return changed_updates(
        lambda name, before, after: (before + after) / 2 if any(each in name for each in fragments) else after
    )


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


CONTEXT = Layout(context=2)


@mutant("positions_of_the_part", "Positions restart at 0 in each rank's shard of a sequence.", layout=CONTEXT)
@around_forward
def _positions_of_the_part(engine: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    ids = keywords["input_ids"]
    return {**keywords, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}


@mutant(
    "targets_of_the_part",
    "Targets are shifted after sharding, so the last token of a shard predicts the wrong token.",
    layout=CONTEXT,
)
@around_forward
def _targets_of_the_part(engine: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    patch = head_of(engine)
    request, positions, _ = patch.wanted
    patch.wanted = request, positions, keywords["input_ids"].flatten().roll(-1)[positions]
    return keywords


@mutant("attention_within_the_part", "A token does not attend to earlier tokens on another rank.", layout=CONTEXT)
@around_forward
def _attention_within_the_part(engine: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    module_of(engine).config.get_text_config()._attn_implementation = "sdpa"
    return keywords


@mutant(
    "gradient_once_a_part",
    "The head's gradient is summed over ranks, so it counts once per shard of the sequence.",
    layout=CONTEXT,
)
@around_step
def _gradient_once_a_part(step: Any, engine: Any, *args: Any) -> Any:
    return scaled(engine.config.parallelism.context, step(*args))


@mutant(
    "gradient_of_one_part", "Gradients are averaged over the shards of a sequence instead of summed.", layout=CONTEXT
)
@around_step
def _gradient_of_one_part(step: Any, engine: Any, *args: Any) -> Any:
    return scaled(1 / engine.config.parallelism.context, step(*args))


@mutant("late_targets_without_gradient", "Targets in the later half of a row contribute no gradient.", layout=CONTEXT)
@around_step
def _late_targets_without_gradient(step: Any, engine: Any, output: Any, microbatch: Any) -> Any:
    length = microbatch.processed_inputs.seq_len
    early = (microbatch.head_positions % length < length // 2).to(output.logprobs.dtype)
    output.logprobs = output.logprobs * early + (output.logprobs * (1 - early)).detach()
    return step(output, microbatch)


EXPERTS = Layout(data=2, expert=2)


def _scaled_gradients(fragment: str, factor: float) -> Callable[[Any], Any]:
    """Multiply the gradients of parameters whose name contains `fragment` by `factor`."""

    @around(Engine.clip_and_step)
    def clip_and_step(call: Any, engine: Any, *args: Any) -> Any:
        for name, parameter in module_of(engine).named_parameters():
            if fragment in name and parameter.grad is not None:
                parameter.grad.mul_(factor)
        return call(*args)

    return clip_and_step


@mutant("router_loss_of_a_microbatch", "The load-balancing loss uses the expert shares of the first microbatch only.")
@around(Engine.build)
def _router_loss_of_a_microbatch(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    if (routers := engine.router_loss) is not None:
        whole = routers.measure_load

        def measure_load(microbatches: Any, forward: Any) -> Any:
            first, all_ = whole(microbatches[:1], forward), whole(microbatches, forward)
            return type(all_)(first.load, all_.tokens)

        routers.measure_load = measure_load


def _exchanged(name: str) -> str:
    """Exchange an expert's `gate_proj` and `up_proj` in a name; return any other name unchanged."""
    if ".experts." not in name:
        return name
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    path, kind, weight = name.rsplit(".", 2)
    return ".".join((path, swapped.get(kind, kind), weight))


@mutant("gate_and_up_exchanged", "The gate and up projections of experts are saved under each other's names.")
@around(Engine.gather_weights)
def _gate_and_up_exchanged(call: Any, engine: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name, weight in call([_exchanged(name) for name in names]):
        yield _exchanged(name), weight


@mutant(
    "moments_of_another_half", "The moments of an expert's gate and up projections are saved under each other's names."
)
@around(Engine.gather_moments)
def _moments_of_another_half(call: Any, engine: Any) -> Iterator[tuple[str, Any]]:
    for name, moments in call():
        yield _exchanged(name), moments


MUTANTS = (
    mutant("router_loss_left_out", "The configured weight of the load-balancing loss is ignored.")(
        before(
            Engine.build,
            lambda engine: setattr(engine, "config", engine.config.model_copy(update={"router_aux_loss_coef": 0.0})),
        )
    ),
    mutant(
        "norm_of_own_part", "Each rank clips by the norm of its own shard of the weights.", layout=TENSOR, needs=SHARDS
    )(clips_own_shards),
    mutant(
        "norms_averaged_along_the_sequence",
        "The gradient of a norm is averaged over the shards of the sequence, not summed.",
        layout=SEQUENCE,
        needs=STATE,
    )(_half_the_update("norm")),
    mutant(
        "norms_of_own_heads",
        "The gradient of a norm shared by all attention heads covers only one rank's heads.",
        layout=TENSOR,
        needs=STATE,
    )(_half_the_update("q_norm", "k_norm")),
    mutant(
        "experts_gradient_of_each_rank",
        "Expert gradients, already summed over all ranks' tokens, are multiplied by the number of ranks.",
        layout=EXPERTS,
    )(_scaled_gradients(".experts.", 2.0)),
    mutant("routers_that_do_not_learn", "The weights of the chosen experts pass no gradient to the router.")(
        _scaled_gradients(".mlp.gate.", 0.0)
    ),
)
