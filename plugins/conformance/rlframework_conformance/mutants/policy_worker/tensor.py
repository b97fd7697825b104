"""Tensor and sequence parallelism, where each rank has a shard of the weights: violations of contracts 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.policy.head.vocabulary_shard import VocabularyShard
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.clipping import clips_own_shards
from rlframework_conformance.mutants.policy_worker.engine_access import STATE, changed_updates, head_of, in_engine
from rlframework_conformance.mutants.policy_worker.measured_gradients import SHARDS, measuring, total_norm

TENSOR = Layout(tensor=2)
SEQUENCE = Layout(tensor=2, sequence=True)


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
    "The gradient norm counts the weights of norms, which are replicated, once per rank.",
    "test_first_step_is_that_of_the_oracle",
    "test_clipping_is_of_the_whole_gradient",
    layout=TENSOR,
    needs=STATE,
)
@in_engine
def copied_weights_counted_twice(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(measuring(engine_class)):  # type: ignore[misc]
        def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
            whole = total_norm(self.gradients.values())
            copied = total_norm(gradient for name, gradient in self.gradients.items() if "norm" in name)
            factor = math.hypot(whole, copied) / whole if whole else 1.0
            limit = None if max_grad_norm is None else max_grad_norm / factor
            found, skipped = super().clip_and_step(limit, lr)
            return found * factor, skipped

    return Broken


norm_of_own_part = mutant(
    "norm_of_own_part",
    "Each rank clips by the norm of its own shard of the weights.",
    "test_clipping_is_of_the_whole_gradient",
    layout=TENSOR,
    needs=SHARDS,
)(clips_own_shards)


def _half_the_update(*fragments: str) -> Any:
    """Halve the updates of the weights whose names contain one of the `fragments`."""
    return changed_updates(
        lambda name, before, after: (before + after) / 2 if any(each in name for each in fragments) else after
    )


norms_averaged_along_the_sequence = mutant(
    "norms_averaged_along_the_sequence",
    "The gradient of a norm is averaged over the shards of the sequence, not summed.",
    "test_first_step_is_that_of_the_oracle",
    "test_twenty_steps_end_at_the_oracles_weights",
    layout=SEQUENCE,
    needs=STATE,
)(_half_the_update("norm"))

norms_of_own_heads = mutant(
    "norms_of_own_heads",
    "The gradient of a norm shared by all attention heads covers only one rank's heads.",
    "test_norms_that_heads_share_are_learnt_from_all",
    layout=TENSOR,
    needs=STATE,
)(_half_the_update("q_norm", "k_norm"))


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
