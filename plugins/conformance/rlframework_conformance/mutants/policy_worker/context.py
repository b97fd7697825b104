"""Context parallelism, where each rank has a shard of every sequence: violations of contract 2."""

from __future__ import annotations

from typing import Any

import torch

from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import around_forward, around_step, head_of, module_of
from rlframework_conformance.mutants.policy_worker.wrong_grouping import scaled

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
