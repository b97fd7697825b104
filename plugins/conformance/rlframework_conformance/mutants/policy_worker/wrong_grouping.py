"""Violations of contract 2: results depend on how rows are grouped, ordered, padded or sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlframework.policy.microbatches.on_demand import on_host
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import mutant
from rlframework_conformance.mutants.policy_worker.engine_access import in_engine, in_service

DATA = Layout(data=2)


def _broken_global_batch(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Any:
    """Break the global batch: it becomes `change(engine, global_batch)`."""

    @in_service("microbatching_class")
    def break_it(microbatching_class: Any) -> Any:
        class Broken(microbatching_class):  # type: ignore[misc]
            def global_batch(self, *args: Any, **kwargs: Any) -> Any:
                return change(self.engine, super().global_batch(*args, **kwargs))

        return Broken

    return break_it


def broken_step(change: Callable[..., Any]) -> Any:
    """Break the training step: it becomes `change(engine, step, output, microbatch)`."""

    @in_engine
    def break_it(engine_class: Any) -> Any:
        class Broken(engine_class):  # type: ignore[misc]
            def forward_backward(self, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
                self.microbatch_count = len(microbatches)

                def broken(output: Any, microbatch: Any) -> Any:
                    return change(self, step, output, microbatch)

                return super().forward_backward(
                    microbatches, head, step if forward_only else broken, forward_only=forward_only
                )

        return Broken

    return break_it


def _broken_microbatches(change: Callable[[Any, list[Any]], list[Any]]) -> Any:
    """Break the training microbatches: they become `change(engine, microbatches)`."""

    @in_service("microbatching_class")
    def break_it(microbatching_class: Any) -> Any:
        class Broken(microbatching_class):  # type: ignore[misc]
            def split(self, data: Any, positions: str, *args: Any) -> Any:
                made = super().split(data, positions, *args)
                return change(self.engine, made) if positions == "loss" else made

        return Broken

    return break_it


def _padding_counted(engine: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "global_valid_toks": torch.tensor(float(found["batch"]["input_ids"].numel()))}


mean_over_padding = mutant(
    "mean_over_padding",
    "The loss is averaged over all positions, including padding.",
    "test_first_step_is_that_of_the_oracle",
    "test_supervised_step_is_that_of_the_oracle",
    "test_padding_changes_nothing",
)(_broken_global_batch(_padding_counted))


def _masked_counted(engine: Any, found: dict[str, Any]) -> dict[str, Any]:
    toks = found["batch"]["token_mask"][:, 1:].sum()
    return {**found, "global_valid_toks": toks, "global_valid_seqs": torch.tensor(float(found["batch"].size))}


masked_rows_counted = mutant(
    "masked_rows_counted",
    "Rows whose `sample_mask` is 0 count in the denominator.",
    "test_masked_rows_count_for_nothing",
    "test_counts_are_of_the_whole_global_batch",
)(_broken_global_batch(_masked_counted))


def _local_counts(engine: Any, found: dict[str, Any]) -> dict[str, Any]:
    batch = found["batch"]
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
    return {
        **found,
        "global_valid_toks": mask.sum().clamp(min=1.0),
        "global_valid_seqs": batch["sample_mask"].sum().clamp(min=1.0),
    }


local_counts = mutant(
    "local_counts",
    "Each worker divides by the counts of its own rows.",
    "test_counts_are_of_the_whole_global_batch",
    "test_workers_with_unequal_work_agree",
    "test_order_of_rows_changes_nothing",
    layout=DATA,
)(_broken_global_batch(_local_counts))

tokens_for_sequences = mutant(
    "tokens_for_sequences",
    "The sequence-level loss divides by the number of tokens.",
    "test_sequence_level_loss_averages_over_sequences",
)(_broken_global_batch(lambda engine, found: {**found, "global_valid_seqs": found["global_valid_toks"]}))


def scaled(factor: float, step: Any, output: Any, microbatch: Any) -> Any:
    """Run `step` and multiply its loss by `factor`."""
    result = step(output, microbatch)
    result.loss = result.loss * factor
    return result


loss_averaged_per_microbatch = mutant(
    "loss_averaged_per_microbatch",
    "Gradients are averaged over microbatches instead of summed.",
    "test_microbatch_size_changes_nothing",
    "test_first_step_is_that_of_the_oracle",
    "test_packed_equals_padded",
    "test_dynamic_equals_padded",
)(broken_step(lambda engine, *args: scaled(1 / engine.microbatch_count, *args)))

gradient_averaged_over_ranks = mutant(
    "gradient_averaged_over_ranks",
    "Gradients are averaged over data-parallel ranks instead of summed.",
    "test_first_step_is_that_of_the_oracle",
    "test_workers_with_unequal_work_agree",
    layout=DATA,
)(broken_step(lambda engine, *args: scaled(1 / engine.data_parallel_size(), *args)))

missing_all_reduce = mutant(
    "missing_all_reduce",
    "Each rank uses the gradient of its own rows only.",
    "test_first_step_is_that_of_the_oracle",
    "test_workers_with_unequal_work_agree",
    layout=DATA,
)(broken_step(lambda engine, *args: scaled(0.0 if engine.context.rank else 2.0, *args)))


def _dummy_as_regular(engine: Any, step: Any, output: Any, microbatch: Any) -> Any:
    if microbatch.is_dummy:
        microbatch.is_dummy = False
        microbatch.data_dict["sample_mask"] = torch.ones_like(microbatch.data_dict["sample_mask"])
        microbatch.data_dict["token_mask"] = torch.ones_like(microbatch.data_dict["token_mask"])
    return step(output, microbatch)


dummy_counted = mutant(
    "dummy_counted",
    "Dummy microbatches, which only keep ranks in step, contribute to the loss.",
    "test_workers_with_unequal_work_agree",
    layout=DATA,
)(broken_step(_dummy_as_regular))


def _first_metrics(engine: Any, step: Any, output: Any, microbatch: Any) -> Any:
    result = step(output, microbatch)
    loss = result.outputs.get("loss")
    if int(microbatch.rows.min()) != 0:
        result.outputs = {} if loss is None else {"loss": loss}
    return result


metrics_of_one_microbatch = mutant(
    "metrics_of_one_microbatch",
    "The reported metrics cover only the first microbatch.",
    "test_metrics_are_of_the_whole_global_batch",
)(broken_step(_first_metrics))


def _without_partial(engine: Any, made: list[Any]) -> list[Any]:
    most = max(len(microbatch.rows) for microbatch in made)
    return [microbatch for microbatch in made if len(microbatch.rows) == most]


last_partial_batch_dropped = mutant(
    "last_partial_batch_dropped",
    "Rows that do not fill a microbatch are not trained on.",
    "test_first_step_is_that_of_the_oracle",
    "test_supervised_step_is_that_of_the_oracle",
    "test_order_of_rows_changes_nothing",
)(_broken_microbatches(_without_partial))


def _without_last_dynamic(engine: Any, made: list[Any]) -> list[Any]:
    return made[:-1] if engine.config.batching.mode == "dynamic" else made


last_dynamic_batch_dropped = mutant(
    "last_dynamic_batch_dropped",
    "The last dynamic microbatch is dropped.",
    "test_dynamic_equals_padded",
)(_broken_microbatches(_without_last_dynamic))


def _one_sequence(engine: Any, made: list[Any]) -> list[Any]:
    for microbatch in on_host(made):
        if microbatch.cu_seqlens is not None:
            microbatch.cu_seqlens = microbatch.cu_seqlens[[0, -1]]
    return made


attention_across_sequences = mutant(
    "attention_across_packed_sequences",
    "Sequences in a packed row attend to the sequences before them.",
    "test_packed_equals_padded",
)(_broken_microbatches(_one_sequence))


def _positions_not_restarted(engine: Any, made: list[Any]) -> list[Any]:
    for microbatch in on_host(made):
        inputs = microbatch.processed_inputs
        if microbatch.cu_seqlens is not None:
            inputs.position_ids = torch.arange(inputs.seq_len, device=inputs.input_ids.device)[None]
    return made


positions_run_through = mutant(
    "positions_run_through",
    "Positions do not restart with each packed sequence, which rotary embeddings hide.",
    "test_positions_start_again_in_packed_rows",
)(_broken_microbatches(_positions_not_restarted))


@mutant(
    "one_step_for_all",
    "All rows of a call form one global batch, regardless of the batch size.",
    "test_several_global_batches_are_several_steps",
    "test_the_schedule_moves_once_a_call",
)
def one_step_for_all(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None) -> Any:
            return super().train(data, loss_fn, eval_mode, data.size * self.engine.data_parallel_size(), mbs)

    return Broken


@mutant(
    "sizes_of_calls_ignored",
    "The batch size given with a call is ignored in favor of the configured one.",
    "test_sizes_may_be_given_with_the_call",
)
def sizes_of_calls_ignored(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None) -> Any:
            data.elem_counts_per_gb = None
            return super().train(data, loss_fn, eval_mode, self.engine.config.train_global_batch_size, mbs)

    return Broken


@mutant(
    "metrics_summed_over_batches",
    "Metrics are summed over global batches.",
    "test_metrics_are_of_the_whole_global_batch",
)
@in_service("training_class")
def metrics_summed_over_batches(training_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(training_class):  # type: ignore[misc]
        def summary(self, batches: Any, *args: Any) -> Any:
            summary = super().summary(batches, *args)
            summary["metrics"] = {name: value * len(batches) for name, value in summary["metrics"].items()}
            return summary

    return Broken


@mutant(
    "evaluates_the_first_batch",
    "Evaluation reports the loss of the first global batch for all of them.",
    "test_several_global_batches_are_evaluated_one_by_one",
)
def evaluates_the_first_batch(worker_class: Any) -> Any:
    """See the mutant's `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None) -> Any:
            result = super().train(data, loss_fn, eval_mode, gbs, mbs)
            if eval_mode:
                result["global_loss"] = result["global_loss"][:1].expand(len(result["global_loss"]))
            return result

    return Broken
