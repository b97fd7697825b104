"""Bugs of tensor and sequence parallelism, against contracts 2 and 3: each rank has a part of the weights."""

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
from rlframework.conformance.mutants.policy_worker import training
from rlframework.conformance.mutants.policy_worker.engine_access import head_of, module_of
from rlframework.policy.head import vocab_parallel

HALVES = Layout(tensor=2)
ALONG = Layout(tensor=2, sequence=True)


def _copied_gradients(worker: Any) -> Iterator[tuple[str, Tensor]]:
    """The gradients, by name, of weights that every rank has whole."""
    shapes = {name: spec.shape for name, spec in worker.weight_specs().items()}
    for name, parameter in module_of(worker).named_parameters():
        if (gradient := parameter.grad) is not None:
            part: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if part.numel() == math.prod(shapes[name]):
                yield name, part


def _with_gradients(change: Any) -> Any:
    """A worker that calls `change(worker)` before each step, its gradients there."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                change(self)
                return super().clip_and_step(max_grad_norm, lr)

        return Broken

    return break_it


def _with_head(change: Any) -> Any:
    """A worker that calls `change(head)` with its head patch once it is built."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def build(self, *, init_optimizer: bool) -> None:
                super().build(init_optimizer=init_optimizer)
                change(head_of(self))

        return Broken

    return break_it


def _pad_the_vocabulary(head: Any) -> None:
    """The last rank has a row of zeros below its own, as where a vocabulary is filled up to divide by the ranks."""
    shard, ordinary = head._shard, head._values
    if dist.get_rank(shard.group) < dist.get_world_size(shard.group) - 1:
        return
    head._shard = replace(shard, rows=shard.rows + 1)

    def values(request: Any, rows: Tensor, weight: Tensor, *others: Any) -> Any:
        return ordinary(request, rows, torch.cat((weight, weight.new_zeros(1, weight.shape[1]))), *others)

    head._values = values


padded_vocabulary_in_the_softmax = mutant(
    "padded_vocabulary_in_the_softmax",
    "rows that fill the vocabulary up to divide by the ranks have a share of the probability",
    "test_logprobs_are_those_of_the_oracle",
    "test_first_step_is_that_of_the_oracle",
    "test_losses_may_ask_for_entropy",
    layout=HALVES,
)(_with_head(_pad_the_vocabulary))


def _forget_the_others(head: Any) -> None:
    vocab_parallel._summed = lambda hidden, shard: hidden


head_gradient_of_own_rows = mutant(
    "head_gradient_of_own_rows",
    "hidden states get the gradient from this rank's rows of the head alone",
    "test_first_step_is_that_of_the_oracle",
    "test_losses_may_ask_for_logits",
    layout=HALVES,
)(_with_head(_forget_the_others))


@mutant(
    "copied_weights_counted_twice",
    "the gradient norm counts weights that every rank has whole once for each rank",
    "test_first_step_is_that_of_the_oracle",
    "test_clipping_is_of_the_whole_gradient",
    layout=HALVES,
)
def copied_weights_counted_twice(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            extra = sum(float(gradient.square().sum()) for _, gradient in _copied_gradients(self))
            own = sum(_square(parameter.grad) for parameter in module_of(self).parameters())
            cut = torch.tensor(own - extra)
            dist.all_reduce(cut)
            right, wrong = math.sqrt(cut.item() + extra), math.sqrt(cut.item() + 2 * extra)
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
    "each rank clips by the norm of its part of the weights",
    "test_clipping_is_of_the_whole_gradient",
    layout=HALVES,
)
def norm_of_own_part(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            norm = math.sqrt(sum(_square(parameter.grad) for parameter in module_of(self).parameters()))
            if max_grad_norm is not None and norm > max_grad_norm:
                for parameter in module_of(self).parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(max_grad_norm / norm)
            return super().clip_and_step(None, lr)

    return Broken


def _average_norms(worker: Any) -> None:
    for _, gradient in _copied_gradients(worker):
        gradient.mul_(0.5)


norms_averaged_along_the_sequence = mutant(
    "norms_averaged_along_the_sequence",
    "the gradient of a norm is the mean over the parts of the sequence",
    "test_first_step_is_that_of_the_oracle",
    "test_twenty_steps_end_at_the_oracles_weights",
    layout=ALONG,
)(_with_gradients(_average_norms))


def _one_rank_of_norms(worker: Any) -> None:
    for name, gradient in _copied_gradients(worker):
        if "q_norm" in name or "k_norm" in name:
            gradient.mul_(0.5)


norms_of_own_heads = mutant(
    "norms_of_own_heads",
    "the gradient of a norm that all heads share is that of a rank's own heads",
    "test_norms_that_heads_share_are_learnt_from_all",
    layout=HALVES,
)(_with_gradients(_one_rank_of_norms))

tied_head_untied_when_split = mutant(
    "tied_head_untied_when_split",
    "splitting the head makes a weight of its own of a tied one",
    "test_saved_names_shapes_and_dtypes_are_those_of_the_model",
    layout=HALVES,
)(training.tied_head_untied.break_it)


@mutant(
    "tied_head_learns_nothing",
    "the rows of a tied head get no gradient from the head, only from the embedding",
    "test_a_tied_head_stays_tied",
    layout=HALVES,
)
def tied_head_learns_nothing(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            head = head_of(self)
            ordinary = head._values
            if "lm_head.weight" not in self.weight_specs():
                head._values = lambda request, rows, weight, *others: ordinary(request, rows, weight.detach(), *others)

    return Broken


@mutant(
    "part_saved_as_whole",
    "the saved weights of a split matrix repeat one rank's part",
    "test_a_saved_model_is_the_trained_one",
    "test_saved_names_shapes_and_dtypes_are_those_of_the_model",
    layout=HALVES,
)
def part_saved_as_whole(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def gather_weights(self, names: Any) -> Iterator[tuple[str, Tensor]]:
            for name, weight in super().gather_weights(names):
                half = weight.shape[0] // 2
                if name.endswith("q_proj.weight"):
                    weight = torch.cat((weight[:half], weight[:half]))
                yield name, weight

    return Broken
