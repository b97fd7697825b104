"""Violations of contract 2: results depend on how rows are grouped, ordered, padded or sharded.

Of contract 13: a loss of groups sees parts of them, or their rows in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.engine import Engine
from rlframework.policy.microbatches.on_demand import on_host
from rlframework.policy.microbatching import Microbatching
from rlframework.policy.training_step import Training
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, entries, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import around_microbatch, around_step

DATA = Layout(data=2)


def scaled(factor: float, result: Any) -> Any:
    """Multiply the loss of the result of a step by `factor`."""
    result.loss = result.loss * factor
    return result


@mutant("loss_averaged_per_microbatch", "Gradients are averaged over microbatches instead of summed.")
@around(Engine.forward_backward)
def _loss_averaged(call: Any, engine: Any, microbatches: Any, head: Any, step: Any, *, forward_only: bool) -> Any:
    def averaged(*args: Any) -> Any:
        return step(*args) if forward_only else scaled(1 / len(microbatches), step(*args))

    return call(microbatches, head, averaged, forward_only=forward_only)


@mutant(
    "gradient_averaged_over_ranks", "Gradients are averaged over data-parallel ranks instead of summed.", layout=DATA
)
@around_step
def _gradient_averaged_over_ranks(step: Any, engine: Any, *args: Any) -> Any:
    return scaled(1 / engine.data_parallel_size(), step(*args))


@mutant("missing_all_reduce", "Each rank uses the gradient of its own rows only.", layout=DATA)
@around_step
def _missing_all_reduce(step: Any, engine: Any, *args: Any) -> Any:
    return scaled(0.0 if engine.context.rank else 2.0, step(*args))


@mutant("dummy_counted", "Dummy microbatches, which only keep ranks in step, contribute to the loss.", layout=DATA)
@around_step
def _dummy_counted(step: Any, engine: Any, output: Any, microbatch: Any) -> Any:
    if microbatch.is_dummy:
        microbatch.is_dummy = False
        microbatch.data_dict["sample_mask"] = torch.ones_like(microbatch.data_dict["sample_mask"])
        microbatch.data_dict["token_mask"] = torch.ones_like(microbatch.data_dict["token_mask"])
    return step(output, microbatch)


@mutant("metrics_of_one_microbatch", "The reported metrics cover only the first microbatch.")
@around_step
def _metrics_of_one_microbatch(step: Any, engine: Any, output: Any, microbatch: Any) -> Any:
    result = step(output, microbatch)
    if int(microbatch.rows.min()) != 0:
        result.outputs = {name: value for name, value in result.outputs.items() if name == "loss"}
    return result


@mutant("last_partial_batch_dropped", "Rows that do not fill a microbatch are not trained on.")
@around(Microbatching.split)
def _last_partial_batch_dropped(call: Any, microbatching: Any, data: Any, positions: str, *how: Any) -> Any:
    microbatches = call(data, positions, *how)
    most = max((len(microbatch.rows) for microbatch in microbatches), default=0)
    whole = [microbatch for microbatch in microbatches if len(microbatch.rows) == most]
    return whole if positions == "loss" else microbatches


@mutant("last_dynamic_batch_dropped", "The last dynamic microbatch is dropped.")
@around(Microbatching.split)
def _last_dynamic_batch_dropped(call: Any, microbatching: Any, data: Any, positions: str, *how: Any) -> Any:
    microbatches = call(data, positions, *how)
    dropped = positions == "loss" and microbatching.engine.config.batching.mode == "dynamic"
    return microbatches[:-1] if dropped else microbatches


@mutant("attention_across_packed_sequences", "Sequences in a packed row attend to the sequences before them.")
@around_microbatch
def _attention_across_packed_sequences(microbatch: Any, positions: str) -> None:
    if microbatch.cu_seqlens is not None:
        microbatch.cu_seqlens = microbatch.cu_seqlens[[0, -1]]


@mutant("positions_run_through", "Positions do not restart with each packed sequence, which rotary embeddings hide.")
@around_microbatch
def _positions_run_through(microbatch: Any, positions: str) -> None:
    inputs = microbatch.processed_inputs
    if microbatch.cu_seqlens is not None:
        inputs.position_ids = torch.arange(inputs.seq_len, device=inputs.input_ids.device)[None]


@mutant("one_step_for_all", "All rows of a call form one global batch, regardless of the batch size.")
@around(PolicyWorker.train)
def _one_step_for_all(
    call: Any, worker: Any, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None
) -> Any:
    return call(data, loss_fn, eval_mode, data.size * worker.engine.data_parallel_size(), mbs)


@mutant("sizes_of_calls_ignored", "The batch size given with a call is ignored in favor of the configured one.")
@around(PolicyWorker.train)
def _sizes_of_calls_ignored(
    call: Any, worker: Any, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None
) -> Any:
    data.elem_counts_per_gb = None
    return call(data, loss_fn, eval_mode, worker.engine.config.train_global_batch_size, mbs)


@mutant("metrics_summed_over_batches", "Metrics are summed over global batches.")
@around(Training.summary)
def _metrics_summed_over_batches(call: Any, training: Any, batches: Any, *args: Any) -> Any:
    summary = call(batches, *args)
    return {**summary, "metrics": {name: value * len(batches) for name, value in summary["metrics"].items()}}


@mutant("evaluates_the_first_batch", "Evaluation reports the loss of the first global batch for all of them.")
@around(PolicyWorker.train)
def _evaluates_the_first_batch(
    call: Any, worker: Any, data: Any, loss_fn: Any, eval_mode: bool = False, *sizes: Any, **options: Any
) -> Any:
    result = call(data, loss_fn, eval_mode, *sizes, **options)
    if eval_mode:
        result["global_loss"] = result["global_loss"][:1].expand(len(result["global_loss"]))
    return result


def _around_split(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorate `change(call, data, positions, rows, tokens)`, in place of `split` for a loss of groups."""

    @around(Microbatching.split)
    def split(call: Any, microbatching: Any, data: Any, *how: Any) -> Any:
        *others, groups = how if len(how) == 4 else (*how, False)
        return change(call, data, *others) if groups else call(data, *how)

    return split


@mutant("groups_divided_by_the_packer", "Rows are assigned to microbatches one by one, whatever their group.")
@_around_split
def _groups_divided_by_the_packer(call: Any, data: Any, *how: Any) -> Any:
    return call(data, *how, False)


@mutant("order_within_groups_lost", "The rows of a group are in another order than in the batch.")
@_around_split
def _order_within_groups_lost(call: Any, data: Any, *how: Any) -> Any:
    return call(data.select_indices(range(data.size - 1, -1, -1)), *how, True)


@mutant(
    "group_ids_of_other_rows", "`group_ids` are not sliced with the rows: each microbatch has those of the first rows."
)
@_around_split
def _group_ids_of_other_rows(call: Any, data: Any, *how: Any) -> Any:
    microbatches = call(data, *how, True)
    for microbatch in on_host(microbatches):
        microbatch.data_dict["group_ids"] = data["group_ids"][: len(microbatch.rows)]
    return microbatches


@mutant(
    "groups_divided_over_ranks",
    "Rows are assigned to data-parallel ranks in turn, whatever their group.",
    layout=DATA,
)
@around(PolicyWorker.train)
def _groups_divided_over_ranks(call: Any, worker: Any, data: Any, *args: Any, **options: Any) -> Any:
    if "group_ids" in data:
        group = worker.engine.data_parallel_group()
        whole: BatchedDataDict[Any] = BatchedDataDict(dict(data)).all_gather(group)
        data = whole.select_indices(range(group.rank(), whole.size, group.size()))
    return call(data, *args, **options)


def _counts_of(batch: Any) -> dict[str, Any]:
    """Return the counts of the rows of one rank."""
    toks = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].sum().clamp(min=1.0)
    return {"global_valid_toks": toks, "global_valid_seqs": batch["sample_mask"].sum().clamp(min=1.0)}


def _counted(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
    """Break the counts that a loss divides by: those of `change(batch)` replace them."""
    return entries(Microbatching.global_batch, lambda processed: change(processed["batch"]))


MUTANTS = (
    mutant("mean_over_padding", "The loss is averaged over all positions, including padding.")(
        _counted(lambda batch: {"global_valid_toks": torch.tensor(float(batch["input_ids"].numel()))})
    ),
    mutant("masked_rows_counted", "Rows whose `sample_mask` is 0 count in the denominator.")(
        _counted(lambda batch: _counts_of({**batch, "sample_mask": torch.ones_like(batch["sample_mask"])}))
    ),
    mutant("local_counts", "Each worker divides by the counts of its own rows.", layout=DATA)(_counted(_counts_of)),
    mutant(
        "groups_counted_by_each_rank",
        "A loss of groups is divided by the rows of its own rank, not by those of the global batch.",
        layout=DATA,
    )(_counted(lambda batch: _counts_of(batch) if "group_ids" in batch else {})),
    mutant("tokens_for_sequences", "The sequence-level loss divides by the number of tokens.")(
        entries(Microbatching.global_batch, lambda processed: {"global_valid_seqs": processed["global_valid_toks"]})
    ),
)
