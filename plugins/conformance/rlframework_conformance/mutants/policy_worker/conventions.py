"""Violations of contract 1: the conventions of inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.training_step import Training
from rlframework_conformance.mutants.mutant import around, mutant, result
from rlframework_conformance.mutants.policy_worker.engine_access import around_step, module_of


def _changed_logprobs(change: Callable[[Tensor, Any], Tensor]) -> Callable[[Any], Any]:
    """Break scoring: the log-probabilities `[B, S]` become `change(logprobs, data)`."""

    @around(PolicyWorker.get_logprobs)
    def get_logprobs(call: Any, worker: Any, data: Any, *args: Any, **options: Any) -> Any:
        return BatchedDataDict({"logprobs": change(call(data, *args, **options)["logprobs"], data)})

    return get_logprobs


@mutant("scored_entropy_in_bits", "Entropies from scoring are in bits instead of nats.")
@around(PolicyWorker.get_logprobs)
def _scored_entropy_in_bits(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    scored = call(*args, **options).items()
    return BatchedDataDict({name: value / math.log(2) if name == "entropy" else value for name, value in scored})


@mutant("positions_ignored", "All positions are scored, whichever were requested.")
@around(PolicyWorker.get_logprobs)
def _positions_ignored(call: Any, worker: Any, *args: Any, **options: Any) -> Any:
    return call(*args, **{**options, "positions": "all"})


@mutant("temperature_in_training_only", "Scores are computed at temperature 1; the loss uses the sampling temperature.")
@around(Engine.forward_backward)
def _temperature_in_training_only(call: Any, engine: Any, rows: Any, head: Any, step: Any, *, forward_only: Any) -> Any:
    return call(rows, replace(head, temperature=1.0) if forward_only else head, step, forward_only=forward_only)


@mutant("temperature_in_scoring_only", "The loss is computed at temperature 1; scores use the sampling temperature.")
@around(Engine.forward_backward)
def _temperature_in_scoring_only(call: Any, engine: Any, rows: Any, head: Any, step: Any, *, forward_only: Any) -> Any:
    return call(rows, head if forward_only else replace(head, temperature=1.0), step, forward_only=forward_only)


@mutant("temperature_in_every_loss", "The supervised loss uses the sampling temperature too.")
@around(Training.head_request)
def _temperature_in_every_loss(call: Any, training: Any, loss_fn: Any) -> Any:
    return replace(call(loss_fn), temperature=training.temperature)


@mutant("dropout_left_on", "Dropout is active while scoring.")
@around(Engine.forward_backward)
def _dropout_left_on(call: Any, engine: Any, *args: Any, forward_only: bool) -> Any:
    def drop(module: Any, inputs: Any, output: Any) -> Any:
        return torch.nn.functional.dropout(output, 0.1, training=forward_only)

    handle = module_of(engine).get_input_embeddings().register_forward_hook(drop)
    try:
        return call(*args, forward_only=forward_only)
    finally:
        handle.remove()


@mutant("padded_vocabulary_in_softmax", "The head is padded with rows of zeros, and they take part in the softmax.")
@around(Engine.forward_backward)
def _padded_vocabulary(call: Any, engine: Any, *args: Any, **options: Any) -> Any:
    """The rows exist only during forwards, so saved names and shapes do not change."""
    head = module_of(engine).get_output_embeddings()
    weight = head._parameters.pop("weight")
    head.weight = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 8))
    try:
        return call(*args, **options)
    finally:
        del head.weight
        head._parameters["weight"] = weight


@mutant("loss_scale_left_in", "The loss is scaled up in low precision and the gradient is never scaled back.")
@around_step
def _loss_scale_left_in(step: Any, engine: Any, *args: Any) -> Any:
    result = step(*args)
    if engine.config.precision != "float32":
        result.loss = result.loss * 8.0
    return result


@mutant("stays_on_the_cpu", "The model is never moved to the device.")
@around(Engine.build)
def _stays_on_the_cpu(call: Any, engine: Any, *, init_optimizer: bool) -> None:
    call(init_optimizer=False)
    module_of(engine).cpu()
    torch.cuda.empty_cache()


MUTANTS = (
    mutant("next_top_tokens", "The top-k tokens are stored at the position that predicts them, as logits are.")(
        result(
            PolicyWorker.get_topk_logits,
            lambda scored: BatchedDataDict({name: values.roll(-1, dims=1) for name, values in scored.items()}),
        )
    ),
    mutant("rank_one_everywhere", "Every worker reports rank 1.")(
        result(PolicyWorker.get_info, lambda info: {**info, "rank": 1})
    ),
    mutant("logprobs_off_by_one", "Log-probabilities are one position too early, at the token that predicts them.")(
        _changed_logprobs(lambda logprobs, data: logprobs.roll(-1, dims=1))
    ),
    mutant("padding_scored", "Padding gets log-probabilities instead of zeros.")(
        _changed_logprobs(lambda logprobs, data: logprobs.where(logprobs != 0, torch.full_like(logprobs, -3.0)))
    ),
    mutant("half_results", "Results come back in half precision.")(
        _changed_logprobs(lambda logprobs, data: logprobs.half())
    ),
    mutant("results_in_bin_order", "Results come back grouped by length, longest row first.")(
        _changed_logprobs(lambda logprobs, data: logprobs[data["input_lengths"].argsort(descending=True)])
    ),
    mutant("partial_batch_unscored", "Rows that do not fill a microbatch are not scored.")(
        _changed_logprobs(lambda logprobs, data: logprobs * (torch.arange(data.size) < data.size // 3 * 3)[:, None])
    ),
)
