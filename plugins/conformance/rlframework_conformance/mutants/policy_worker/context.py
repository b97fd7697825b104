"""Context parallelism, where each rank has a shard of every sequence: violations of contract 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import head_of, in_engine, module_of
from rlframework_conformance.mutants.policy_worker.wrong_grouping import broken_step, scaled

CONTEXT = Layout(context=2)


def broken_forward(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Any:
    """Break each forward: the model gets the keyword arguments `change(worker, keywords)`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
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


def _restarted_positions(worker: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    ids = keywords["input_ids"]
    return {**keywords, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}


positions_of_the_part = mutant(
    "positions_of_the_part",
    "Positions restart at 0 in each rank's shard of a sequence.",
    "test_first_step_is_that_of_the_oracle",
    "test_dynamic_equals_padded",
    "test_positions_start_again_in_packed_rows",
    layout=CONTEXT,
)(broken_forward(_restarted_positions))


def _shifted_after_sharding(worker: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    patch = head_of(worker)
    request, positions, _ = patch.wanted
    patch.wanted = request, positions, keywords["input_ids"].flatten().roll(-1)[positions]
    return keywords


targets_of_the_part = mutant(
    "targets_of_the_part",
    "Targets are shifted after sharding, so the last token of a shard predicts the wrong token.",
    "test_logprobs_are_those_of_the_oracle",
    "test_first_step_is_that_of_the_oracle",
    "test_packed_equals_padded",
    layout=CONTEXT,
)(broken_forward(_shifted_after_sharding))


def _local_attention(worker: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    module_of(worker).config.get_text_config()._attn_implementation = "sdpa"  # type: ignore[union-attr, operator]
    return keywords


attention_within_the_part = mutant(
    "attention_within_the_part",
    "A token does not attend to earlier tokens on another rank.",
    "test_logprobs_are_those_of_the_oracle",
    "test_first_step_is_that_of_the_oracle",
    "test_packed_equals_padded",
    layout=CONTEXT,
)(broken_forward(_local_attention))

gradient_once_a_part = mutant(
    "gradient_once_a_part",
    "The head's gradient is summed over ranks, so it counts once per shard of the sequence.",
    "test_first_step_is_that_of_the_oracle",
    "test_packed_equals_padded",
    "test_activation_checkpointing_changes_nothing",
    layout=CONTEXT,
)(broken_step(lambda worker, *args: scaled(worker.config.parallelism.context, *args)))

gradient_of_one_part = mutant(
    "gradient_of_one_part",
    "Gradients are averaged over the shards of a sequence instead of summed.",
    "test_first_step_is_that_of_the_oracle",
    "test_targets_may_lie_at_one_end_of_their_rows",
    layout=CONTEXT,
)(broken_step(lambda worker, *args: scaled(1 / worker.config.parallelism.context, *args)))


def _late_targets_detached(worker: Any, step: Any, output: Any, microbatch: Any) -> Any:
    """Detach the targets in the later half of each row; the value of the loss is unchanged."""
    length = microbatch.processed_inputs.seq_len
    early = (microbatch.head_positions % length < length // 2).to(output.logprobs.dtype)
    output.logprobs = output.logprobs * early + (output.logprobs * (1 - early)).detach()
    return step(output, microbatch)


late_targets_without_gradient = mutant(
    "late_targets_without_gradient",
    "Targets in the later half of a row contribute no gradient.",
    "test_targets_may_lie_at_one_end_of_their_rows",
    "test_packed_equals_padded",
    layout=CONTEXT,
)(broken_step(_late_targets_detached))
