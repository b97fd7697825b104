"""Mutants of microbatches that do not keep groups of rows together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlframework.interfaces.data_processor import DataProcessor
from rlframework.policy.microbatches.global_batch import rows_with_targets
from rlframework_conformance.mutants.data_processor.changes import batch_with, in_each_microbatch
from rlframework_conformance.mutants.mutant import around, mutant


@mutant("groups_divided_by_the_packer", "Rows are packed one by one, whatever their group.")
@around(DataProcessor.microbatches)
def _packed_one_by_one(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    return make(data, replace(plan, groups=False), *rule, **how)


@mutant("order_within_groups_lost", "The rows of a group are in another order than in the batch.")
@around(DataProcessor.microbatches)
def _groups_reversed(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    if not plan.groups or data.micro_batch_indices is not None:
        return make(data, plan, *rule, **how)
    last = data.size - 1
    microbatches = make(data.select_indices(range(last, -1, -1)), plan, *rule, **how)
    return [replace(each, rows=last - each.rows) for each in microbatches]


@mutant("groups_over_the_limit", "The limit is checked for rows, and a group of them may exceed it.")
@around(DataProcessor.microbatches)
def _limit_of_rows(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    return make(data, replace(plan, rows=3 * plan.rows, tokens=3 * plan.tokens) if plan.groups else plan, *rule, **how)


@mutant(
    "group_ids_of_other_rows", "`group_ids` are not sliced with the rows: each microbatch has those of the first rows."
)
@in_each_microbatch
def _ids_of_the_first_rows(microbatch: Any, data: Any) -> Any:
    if "group_ids" not in data:
        return microbatch
    ids = data["group_ids"][: len(microbatch.rows)]
    return replace(microbatch, data_dict=batch_with(microbatch.data_dict, group_ids=ids))


@mutant("masked_rows_leave_their_group", "Rows that do not count are left out of their group.")
@around(DataProcessor.microbatches)
def _masked_left_out(make: Any, _: Any, data: Any, *plan: Any, positions: str, device: Any) -> Any:
    if not plan[0].groups or data.micro_batch_indices is not None:
        return make(data, *plan, positions=positions, device=device)
    kept = rows_with_targets(data, positions).nonzero()[:, 0]
    microbatches = make(data.select_indices(kept), *plan, positions=positions, device=device) if len(kept) else []
    return [replace(each, rows=kept[each.rows]) for each in microbatches]


@mutant("padded_plan_of_groups_ignored", "A plan of padded microbatches is ignored, as for single rows.")
@around(DataProcessor.microbatches)
def _padded_plan_ignored(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    return make(batch_with(data, planned=plan.mode != "padded"), plan, *rule, **how)


@mutant("divided_plan_accepted", "A plan that divides a group is carried out.")
@around(DataProcessor.microbatches)
def _plan_not_checked(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    checked = data.micro_batch_indices is None or plan.mode == "padded"
    return make(data, plan if checked else replace(plan, groups=False), *rule, **how)
