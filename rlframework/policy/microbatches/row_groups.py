"""The rows that are computed, and groups of rows that a loss needs in one microbatch (`needs_groups`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batch_rows import describe, is_integral
from rlframework.interfaces.data_processor import RowsToPlan
from rlframework.interfaces.loss import GROUP_IDS
from rlframework.policy.microbatches.global_batch import rows_with_targets

if TYPE_CHECKING:
    from rlframework.batch.batched_data_dict import BatchedDataDict


def rows_to_plan(data: BatchedDataDict[Any], positions: str, *, groups: bool) -> RowsToPlan:
    """Return the rows of `data` that have one of the `positions`, with `groups` and the others of their groups."""
    wanted = rows_with_targets(data, positions)
    if not groups:
        return RowsToPlan(data, wanted)
    return RowsToPlan(data, with_whole_groups(wanted, data), read_group_ids(data))


def read_group_ids(data: BatchedDataDict[Any]) -> Tensor:
    """Return `group_ids [B]`; raise `BatchError` unless they are integers, one for each row."""
    ids = data.get(GROUP_IDS)
    if ids is None:
        raise BatchKeyError(
            f"{GROUP_IDS} must be present in the data, as the loss needs groups of rows (needs_groups); it has "
            f"{sorted(data, key=str)}"
        )
    if not is_integral(ids) or ids.shape != (data.size,):
        raise BatchTypeError(f"{GROUP_IDS} must be a tensor [B] = [{data.size}] of integers, got {describe(ids)}")
    return ids


def with_whole_groups(wanted: Tensor, data: BatchedDataDict[Any]) -> Tensor:
    """Return `[B]` bool: the rows of groups with at least one `wanted [B]` row.

    Raises `BatchError` if such a group has a row without tokens, which no model can compute.
    """
    ids = read_group_ids(data)
    found, group = ids.unique(return_inverse=True)
    kept = torch.zeros(len(found), dtype=torch.bool, device=ids.device)
    kept[group[wanted]] = True
    rows = kept[group]
    empty = rows & (data["input_lengths"] == 0)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise BatchError(
            f"row {row} of group {int(ids[row])} has no tokens; give it at least one, or set the sample_mask of the "
            "whole group to 0"
        )
    return rows


def check_planned(microbatches: Sequence[Tensor], ids: Tensor) -> None:
    """Raise `BatchError` unless each group of `ids [B]` is in one of the planned `microbatches` of rows."""
    sizes = torch.tensor([len(rows) for rows in microbatches], dtype=torch.int64)
    microbatch = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    rows = torch.cat([*microbatches, sizes[:0]])
    pairs = torch.stack((ids[rows].to("cpu", torch.int64), microbatch)).unique(dim=1)[0]
    divided = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(divided):
        raise BatchError(
            f"group {int(divided[0])} is divided over several planned microbatches, but the loss needs whole groups; "
            f"plan them with group_ids_key={GROUP_IDS!r}"
        )
