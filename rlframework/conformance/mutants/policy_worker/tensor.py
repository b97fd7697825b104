"""Tensor and sequence parallelism, where each rank has a shard of the weights: violations of contracts 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.mutant import mutant
from rlframework.conformance.mutants.policy_worker.engine_access import head_of, in_engine, module_of
from rlframework.policy.head.vocabulary_shard import VocabularyShard

TENSOR = Layout(tensor=2)
SEQUENCE = Layout(tensor=2, sequence=True)


def _replicated_gradients(worker: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients, by name, of weights that are replicated on every rank."""
    shapes = {name: spec.shape for name, spec in worker.weight_specs().items()}
    for name, parameter in module_of(worker).named_parameters():
        if (gradient := parameter.grad) is not None:
            local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if local.numel() == math.prod(shapes[name]):
                yield name, local


def _with_gradients(change: Any) -> Any:
    """Call `change(worker)` before each step, when the gradients exist."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                change(self)
                return super().clip_and_step(max_grad_norm, lr)

        return Broken

    return break_it


def with_head(change: Any) -> Any:
    """Call `change(head)` with the head patch after `build`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def build(self, *, init_optimizer: bool) -> None:
                super().build(init_optimizer=init_optimizer)
                change(head_of(self))

        return Broken

    return break_it


def _pad_the_vocabulary(head: Any) -> None:
    """Append a row of zeros on the last rank, as when a vocabulary is padded to a multiple of the ranks."""
    shard, sound_values = head.shard, head.values
    if dist.get_rank(shard.group) < dist.get_world_size(shard.group) - 1:
        return
    head.shard = replace(shard, rows=shard.rows + 1)

    def values(request: Any, rows: Tensor, weight: Tensor, *others: Any) -> Any:
        return sound_values(request, rows, torch.cat((weight, weight.new_zeros(1, weight.shape[1]))), *others)

    head.values = values


padded_vocabulary_in_the_softmax = mutant(
    "padded_vocabulary_in_the_softmax",
    "Rows that pad the vocabulary to a multiple of the ranks take part in the softmax.",
    "test_logprobs_are_those_of_the_oracle",
    "test_first_step_is_that_of_the_oracle",
    "test_losses_may_ask_for_entropy",
    layout=TENSOR,
)(with_head(_pad_the_vocabulary))


def _skip_all_reduce(head: Any) -> None:
    VocabularyShard.with_summed_gradient = lambda self, hidden: hidden  # type: ignore[method-assign]


head_gradient_of_own_rows = mutant(
    "head_gradient_of_own_rows",
    "Hidden states get the gradient of this rank's rows of the head only.",
    "test_first_step_is_that_of_the_oracle",
    "test_losses_may_ask_for_logits",
    layout=TENSOR,
)(with_head(_skip_all_reduce))


@mutant(
    "copied_weights_counted_twice",
    "The gradient norm counts replicated weights once per rank.",
    "test_first_step_is_that_of_the_oracle",
    "test_clipping_is_of_the_whole_gradient",
    layout=TENSOR,
)
@in_engine
def copied_weights_counted_twice(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            extra = sum(float(gradient.square().sum()) for _, gradient in _replicated_gradients(self))
            own = sum(_square(parameter.grad) for parameter in module_of(self).parameters())
            sharded = torch.tensor(own - extra)
            dist.all_reduce(sharded)
            right, wrong = math.sqrt(sharded.item() + extra), math.sqrt(sharded.item() + 2 * extra)
            limit = None if max_grad_norm is None or not right else max_grad_norm * right / wrong
            norm, skipped = super().clip_and_step(limit, lr)
            return norm * wrong / right if right else norm, skipped

    return Broken


def _square(gradient: Any) -> float:
    if gradient is None:
        return 0.0
    return float((gradient.to_local() if hasattr(gradient, "to_local") else gradient).square().sum())


@mutant(
    "norm_of_own_part",
    "Each rank clips by the norm of its own shard of the weights.",
    "test_clipping_is_of_the_whole_gradient",
    layout=TENSOR,
)
@in_engine
def norm_of_own_part(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            norm = math.sqrt(sum(_square(parameter.grad) for parameter in module_of(self).parameters()))
            if max_grad_norm is not None and norm > max_grad_norm:
                for parameter in module_of(self).parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(max_grad_norm / norm)
            return super().clip_and_step(None, lr)

    return Broken


def _halve_replicated(worker: Any) -> None:
    for _, gradient in _replicated_gradients(worker):
        gradient.mul_(0.5)


norms_averaged_along_the_sequence = mutant(
    "norms_averaged_along_the_sequence",
    "The gradient of a norm is averaged over the shards of the sequence, not summed.",
    "test_first_step_is_that_of_the_oracle",
    "test_twenty_steps_end_at_the_oracles_weights",
    layout=SEQUENCE,
)(_with_gradients(_halve_replicated))


def _halve_head_norms(worker: Any) -> None:
    for name, gradient in _replicated_gradients(worker):
        if "q_norm" in name or "k_norm" in name:
            gradient.mul_(0.5)


norms_of_own_heads = mutant(
    "norms_of_own_heads",
    "The gradient of a norm shared by all attention heads covers only one rank's heads.",
    "test_norms_that_heads_share_are_learnt_from_all",
    layout=TENSOR,
)(_with_gradients(_halve_head_norms))


@mutant(
    "tied_head_learns_nothing",
    "A tied weight gets a gradient from the embedding but not from the head.",
    "test_a_tied_head_stays_tied",
    layout=TENSOR,
)
@in_engine
def tied_head_learns_nothing(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            head = head_of(self)
            sound_values = head.values
            if "lm_head.weight" not in self.weight_specs():
                head.values = lambda request, rows, weight, *others: sound_values(
                    request, rows, weight.detach(), *others
                )

    return Broken


@mutant(
    "part_saved_as_whole",
    "A sharded matrix is saved as repeated copies of one rank's shard.",
    "test_a_saved_model_is_the_trained_one",
    "test_saved_names_shapes_and_dtypes_are_those_of_the_model",
    layout=TENSOR,
)
@in_engine
def part_saved_as_whole(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def gather_weights(self, names: Any) -> Iterator[tuple[str, Tensor]]:
            for name, weight in super().gather_weights(names):
                half = weight.shape[0] // 2
                if name.endswith("q_proj.weight"):
                    weight = torch.cat((weight[:half], weight[:half]))
                yield name, weight

    return Broken
