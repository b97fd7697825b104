"""Violations of contract 13: a loss of groups sees parts of them, or their rows in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.policy.microbatches.on_demand import on_host
from rlframework.policy.microbatching import Microbatching
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, mutant


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
    layout=Layout(data=2),
)
@around(PolicyWorker.train)
def _groups_divided_over_ranks(call: Any, worker: Any, data: Any, *args: Any, **options: Any) -> Any:
    if "group_ids" in data:
        group = worker.engine.data_parallel_group()
        whole: BatchedDataDict[Any] = BatchedDataDict(dict(data)).all_gather(group)
        data = whole.select_indices(range(group.rank(), whole.size, group.size()))
    return call(data, *args, **options)


@mutant(
    "groups_counted_by_each_rank",
    "A loss of groups is divided by the rows of its own rank, not by those of the global batch.",
    layout=Layout(data=2),
)
@around(Microbatching.global_batch)
def _groups_counted_by_each_rank(call: Any, microbatching: Any, *args: Any) -> Any:
    processed = call(*args)
    batch = processed["batch"]
    own = {"global_valid_seqs": batch["sample_mask"].sum().clamp(min=1.0)} if "group_ids" in batch else {}
    return {**processed, **own}
