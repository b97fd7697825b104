"""Bugs of context parallelism, against contract 2: each rank has a part of every sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.mutant import mutant
from rlframework.conformance.mutants.policy_worker.engine_access import head_of, module_of
from rlframework.conformance.mutants.policy_worker.grouping import scaled, stepped

HALVES = Layout(context=2)


def _given(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Any:
    """A worker whose model gets, in each forward, what `change(worker, keywords)` makes of its keywords."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
                handle = module_of(self).register_forward_pre_hook(
                    lambda module, given, keywords: (given, change(self, keywords)), with_kwargs=True
                )
                try:
                    return super().forward_backward(*args, **kwargs)
                finally:
                    handle.remove()

        return Broken

    return break_it


def _restarting(worker: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    ids = keywords["input_ids"]
    return {**keywords, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}


positions_of_the_part = mutant(
    "positions_of_the_part",
    "positions start again at 0 in each rank's part of a sequence",
    "test_first_step_is_that_of_the_oracle",
    "test_dynamic_equals_padded",
    "test_positions_start_again_in_packed_rows",
    layout=HALVES,
)(_given(_restarting))


def _shifted_late(worker: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    patch = head_of(worker)
    patch._targets = keywords["input_ids"].flatten().roll(-1)[patch._positions]
    return keywords


targets_of_the_part = mutant(
    "targets_of_the_part",
    "targets are shifted after the sequence is split: the last token of a part predicts what does not follow it",
    "test_logprobs_are_those_of_the_oracle",
    "test_first_step_is_that_of_the_oracle",
    "test_packed_equals_padded",
    layout=HALVES,
)(_given(_shifted_late))


def _blind(worker: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    module_of(worker).config.get_text_config()._attn_implementation = "sdpa"  # type: ignore[union-attr, operator]
    return keywords


attention_within_the_part = mutant(
    "attention_within_the_part",
    "a token does not see the tokens before it that another rank has",
    "test_logprobs_are_those_of_the_oracle",
    "test_first_step_is_that_of_the_oracle",
    "test_packed_equals_padded",
    layout=HALVES,
)(_given(_blind))

gradient_once_a_part = mutant(
    "gradient_once_a_part",
    "each rank's gradient of the head's values is added up, which counts them once for each part of the sequence",
    "test_first_step_is_that_of_the_oracle",
    "test_packed_equals_padded",
    "test_activation_checkpointing_changes_nothing",
    layout=HALVES,
)(stepped(lambda worker, *args: scaled(worker.config.parallelism.context, *args)))

gradient_of_one_part = mutant(
    "gradient_of_one_part",
    "a weight's gradient is the mean over the parts of a sequence",
    "test_first_step_is_that_of_the_oracle",
    "test_targets_may_lie_at_one_end_of_their_rows",
    layout=HALVES,
)(stepped(lambda worker, *args: scaled(1 / worker.config.parallelism.context, *args)))


def _of_own_part(worker: Any, step: Any, output: Any, microbatch: Any) -> Any:
    """Only one part's targets have a gradient; the loss itself is right."""
    length = microbatch.processed_inputs.seq_len
    early = (microbatch.head_positions % length < length // 2).to(output.logprobs.dtype)
    output.logprobs = output.logprobs * early + (output.logprobs * (1 - early)).detach()
    return step(output, microbatch)


late_targets_without_gradient = mutant(
    "late_targets_without_gradient",
    "nothing is learnt from the targets in the later half of a row",
    "test_targets_may_lie_at_one_end_of_their_rows",
    "test_packed_equals_padded",
    layout=HALVES,
)(stepped(_of_own_part))
