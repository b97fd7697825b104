"""Violations of contract 1: the conventions of inputs and outputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, in_service, module_of


def _broken_logprobs(change: Any) -> Any:
    """Break scoring: the log-probabilities `[B, S]` become `change(logprobs, data)`."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def get_logprobs(self, data: Any, *args: Any, **kwargs: Any) -> Any:
                logprobs = super().get_logprobs(data, *args, **kwargs)["logprobs"]
                return BatchedDataDict({"logprobs": change(logprobs, data)})

        return Broken

    return break_it


off_by_one = mutant(
    "logprobs_off_by_one",
    "Log-probabilities are one position too early, at the token that predicts them.",
    "test_logprobs_are_those_of_the_oracle",
    "test_only_asked_positions_are_scored",
)(_broken_logprobs(lambda logprobs, data: logprobs.roll(-1, dims=1)))

padding_scored = mutant(
    "padding_scored",
    "Padding gets log-probabilities instead of zeros.",
    "test_first_position_and_padding_are_zero",
    "test_padding_changes_nothing",
)(_broken_logprobs(lambda logprobs, data: logprobs.where(logprobs != 0, torch.full_like(logprobs, -3.0))))


@mutant(
    "scored_entropy_in_bits",
    "Entropies from scoring are in bits instead of nats.",
    "test_entropies_come_with_log_probabilities",
)
def scored_entropy_in_bits(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            found = super().get_logprobs(*args, **kwargs)
            return BatchedDataDict({k: v / math.log(2) if k == "entropy" else v for k, v in found.items()})

    return Broken


@mutant(
    "next_top_tokens",
    "The top-k tokens are stored at the position that predicts them, as logits are.",
    "test_the_likeliest_tokens_are_those_of_the_oracle",
)
def next_top_tokens(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_topk_logits(self, *args: Any, **kwargs: Any) -> Any:
            found = super().get_topk_logits(*args, **kwargs)
            return BatchedDataDict({name: values.roll(-1, dims=1) for name, values in found.items()})

    return Broken


half_results = mutant(
    "half_results",
    "Results come back in half precision.",
    "test_results_are_fp32_on_the_cpu",
)(_broken_logprobs(lambda logprobs, data: logprobs.half()))

bin_order = mutant(
    "results_in_bin_order",
    "Results come back grouped by length, longest row first.",
    "test_results_come_in_the_order_of_the_rows",
    "test_packed_results_come_in_the_order_of_the_rows",
)(_broken_logprobs(lambda logprobs, data: logprobs[data["input_lengths"].argsort(descending=True)]))

partial_batch_unscored = mutant(
    "partial_batch_unscored",
    "Rows that do not fill a microbatch are not scored.",
    "test_a_batch_may_have_any_number_of_rows_when_scored",
)(_broken_logprobs(lambda logprobs, data: logprobs * (torch.arange(data.size) < data.size // 3 * 3)[:, None]))


@mutant(
    "positions_ignored",
    "All positions are scored, whichever were requested.",
    "test_only_asked_positions_are_scored",
)
def positions_ignored(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_logprobs(self, *args: Any, **kwargs: Any) -> Any:
            return super().get_logprobs(*args, **{**kwargs, "positions": "all"})

    return Broken


def _fixed_temperature(scoring: float | None, training: float | None) -> Any:
    """Fix the temperature of scoring or training; None leaves it as configured."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def forward_backward(self, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
                fixed = scoring if forward_only else training
                head = head if fixed is None else replace(head, temperature=fixed)
                return super().forward_backward(microbatches, head, step, forward_only=forward_only)

        return Broken

    return break_it


temperature_in_training_only = mutant(
    "temperature_in_training_only",
    "Scores are computed at temperature 1; the loss uses the sampling temperature.",
    "test_scoring_and_training_are_at_the_temperature_of_sampling",
)(_fixed_temperature(1.0, None))

temperature_in_scoring_only = mutant(
    "temperature_in_scoring_only",
    "The loss is computed at temperature 1; scores use the sampling temperature.",
    "test_scoring_and_training_are_at_the_temperature_of_sampling",
)(_fixed_temperature(None, 1.0))


@mutant(
    "temperature_in_every_loss",
    "The supervised loss uses the sampling temperature too.",
    "test_supervised_loss_is_at_temperature_one",
)
@in_service("training_class")
def temperature_in_every_loss(training_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(training_class):  # type: ignore[misc]
        def head_request(self, loss_fn: Any) -> Any:
            return replace(super().head_request(loss_fn), temperature=self.temperature)

    return Broken


@mutant(
    "dropout_left_on",
    "Dropout is active while scoring.",
    "test_logprobs_are_those_of_the_oracle",
    "test_scoring_changes_nothing",
)
@in_engine
def dropout_left_on(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def forward_backward(self, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
            def drop(module: Any, inputs: Any, output: Any) -> Any:
                return torch.nn.functional.dropout(output, 0.1, training=forward_only)

            handle = module_of(self).get_input_embeddings().register_forward_hook(drop)  # type: ignore[operator]
            try:
                return super().forward_backward(microbatches, head, step, forward_only=forward_only)
            finally:
                handle.remove()

    return Broken


@mutant(
    "padded_vocabulary_in_softmax",
    "The head is padded with rows of zeros, and they take part in the softmax.",
    "test_logprobs_are_those_of_the_oracle",
    "test_first_step_is_that_of_the_oracle",
)
@in_engine
def padded_vocabulary(engine_class: Any) -> Any:
    """See the mutant's `bug`. The rows exist only during forwards, so saved names and shapes do not change."""

    class Broken(engine_class):  # type: ignore[misc]
        def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
            head = module_of(self).get_output_embeddings()  # type: ignore[operator]
            weight = head.weight
            padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 8))
            del head._parameters["weight"]
            head.weight = padded
            try:
                return super().forward_backward(*args, **kwargs)
            finally:
                del head.weight
                head._parameters["weight"] = weight

    return Broken


@mutant(
    "loss_scale_left_in",
    "The loss is scaled up in low precision and the gradient is never scaled back.",
    "test_bfloat16_is_near_fp32",
)
@in_engine
def loss_scale_left_in(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def forward_backward(self, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
            def scaled(output: Any, microbatch: Any) -> Any:
                result = step(output, microbatch)
                if result.loss is not None and self.config.precision != "float32":
                    result.loss = result.loss * 8.0
                return result

            return super().forward_backward(microbatches, head, scaled, forward_only=forward_only)

    return Broken


@mutant("stays_on_the_cpu", "The model is never moved to the device.", "test_the_model_lies_on_the_gpu")
@in_engine
def stays_on_the_cpu(engine_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(engine_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=False)
            module_of(self).cpu()
            torch.cuda.empty_cache()

    return Broken


@mutant("rank_one_everywhere", "Every worker reports rank 1.", "test_workers_report_their_rank")
def rank_one_everywhere(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def get_info(self) -> Any:
            return {**super().get_info(), "rank": 1}

    return Broken
