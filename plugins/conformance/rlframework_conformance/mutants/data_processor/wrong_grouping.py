"""Mutants of microbatches that are built from the wrong rows, limits or masks, or divide groups of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlframework.interfaces.data_processor import DataProcessor
from rlframework.policy.microbatches.global_batch import rows_with_targets
from rlframework_conformance.mutants.data_processor.contents import batch_with, in_each_microbatch
from rlframework_conformance.mutants.mutant import around, mutant


@mutant("last_partial_batch_dropped", "The last microbatch is dropped when it has fewer rows than the others.")
@around(DataProcessor.microbatches)
def _last_dropped(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    microbatches = list(make(data, plan, *rule, **how))
    partial = bool(microbatches) and len(microbatches[-1].rows) < max(len(each.rows) for each in microbatches)
    return microbatches[:-1] if partial else microbatches


@mutant("token_limit_exceeded", "The token limit is checked before a row is added to a microbatch, not after.")
@around(DataProcessor.microbatches)
def _limit_checked_too_early(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    return make(data, replace(plan, tokens=plan.tokens + int(data["input_lengths"].max())), *rule, **how)


@mutant("one_row_more", "Padded microbatches have one row more than planned.")
@around(DataProcessor.microbatches)
def _one_row_more(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    return make(data, replace(plan, rows=plan.rows + 1), *rule, **how)


@mutant("plan_of_the_driver_ignored", "The worker makes its own microbatches where the driver has planned them.")
@around(DataProcessor.microbatches)
def _plan_ignored(make: Any, _: Any, data: Any, *plan: Any, **how: Any) -> Any:
    return make(batch_with(data, planned=False), *plan, **how)


@mutant("long_rows_cut", "Rows over the token limit are silently truncated.")
@around(DataProcessor.microbatches)
def _truncated_to_the_limit(make: Any, _: Any, data: Any, plan: Any, *rule: Any, **how: Any) -> Any:
    if plan.mode != "padded":
        data = batch_with(data, input_lengths=data["input_lengths"].clamp(max=plan.tokens))
    return make(data, plan, *rule, **how)


@mutant("unknown_positions_mean_all", "A misspelled `positions` selects all positions.")
@around(DataProcessor.microbatches)
def _unknown_means_all(make: Any, _: Any, data: Any, *plan: Any, positions: str, device: Any) -> Any:
    accepted = positions if positions in ("token_mask", "loss") else "all"
    return make(data, *plan, positions=accepted, device=device)


@mutant("masked_rows_scored", "Rows whose `sample_mask` is 0 go through the model in training.")
@around(DataProcessor.microbatches)
def _masked_rows_kept(make: Any, _: Any, data: Any, *plan: Any, positions: str, device: Any) -> Any:
    unmasked = {"loss": "token_mask", "loss_last": "last"}.get(positions, positions)
    return make(data, *plan, positions=unmasked, device=device)


@mutant("token_mask_ignored", "The head runs at every token, regardless of `token_mask`.")
@around(DataProcessor.microbatches)
def _token_mask_ignored(make: Any, _: Any, data: Any, *plan: Any, positions: str, device: Any) -> Any:
    return make(data, *plan, positions="all" if positions == "token_mask" else positions, device=device)


@mutant("multiple_ignored", "Lengths are not padded to the engine's multiple.")
@around(DataProcessor.microbatches)
def _multiple_ignored(make: Any, _: Any, data: Any, plan: Any, rule: Any, **how: Any) -> Any:
    return make(data, plan, replace(rule, pad_multiple=1), **how)


@mutant("padding_is_real", "Every row is as long as the batch is wide: padding is packed and predicted.")
@around(DataProcessor.microbatches)
def _padding_as_tokens(make: Any, _: Any, data: Any, *plan: Any, **how: Any) -> Any:
    width = data["input_ids"].shape[1]
    return make(batch_with(data, input_lengths=torch.full_like(data["input_lengths"], width)), *plan, **how)


@mutant("one_token_is_two", "A row of zero or one token has a target.")
@around(DataProcessor.microbatches)
def _one_token_is_two(make: Any, _: Any, data: Any, *plan: Any, **how: Any) -> Any:
    return make(batch_with(data, input_lengths=data["input_lengths"].clamp(min=2)), *plan, **how)


@mutant("changed_in_place", "The padding in the caller's batch is overwritten.")
@around(DataProcessor.microbatches)
def _changed_in_place(make: Any, _: Any, data: Any, *plan: Any, **how: Any) -> Any:
    microbatches = list(make(data, *plan, **how))
    real = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    data["input_ids"].masked_fill_(~real, 0)
    return microbatches


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
