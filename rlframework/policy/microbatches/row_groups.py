"""Groups of rows that a loss needs in one microbatch (`needs_groups`): reading `group_ids`, and checks of limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batch_rows import describe, is_integral, round_up
from rlframework.batch.packing import RowGroups
from rlframework.interfaces.loss import GROUP_IDS
from rlframework.policy.microbatches.shapes import Padding

if TYPE_CHECKING:
    from rlframework.batch.batched_data_dict import BatchedDataDict

KEYS = {"padded": "policy.train_micro_batch_size", "dynamic": "policy.batching.tokens"}
KEYS["packed"] = KEYS["dynamic"]


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


def least_tokens(lengths: Tensor, padding: Padding, mode: str, ids: Tensor | None) -> int:
    """Return the tokens of a `mode` microbatch that has room for each row of `lengths [B]`, and for each group.

    `ids [B]`: the groups, None if there are none. The padding must be one without a limit.
    """
    longest = padding.width(int(lengths.max()))
    if ids is None or mode == "padded":
        return longest
    groups = RowGroups.of(ids, len(lengths))
    if mode == "dynamic":
        return max(longest, int(groups.sizes.max()) * round_up(int(lengths.max()), padding.multiple))
    return max(longest, round_up(int(groups.sums(lengths.cpu().numpy()).max()), padding.multiple))


def check_groups_fit(ids: Tensor, widths: Sequence[int], mode: str, most: int) -> None:
    """Raise `BatchError` unless each group fits into a microbatch of `most` rows (padded) or tokens.

    `widths [B]`: the length of each row, padded if `mode` is "dynamic"; 0 for rows that are left out.
    """
    groups, lengths = RowGroups.of(ids, len(widths)), np.asarray(widths, dtype=np.int64)
    largest = groups.largest(lengths)
    if mode == "padded":
        needed = np.where(largest > 0, groups.sizes, 0)
    else:
        needed = groups.sizes * largest if mode == "dynamic" else groups.sums(lengths)
    groups.require(needed, most, "rows" if mode == "padded" else "tokens", KEYS[mode])


def check_planned(ranges: Sequence[Sequence[int]], ids: Tensor) -> None:
    """Raise `BatchError` unless each group is in one of the planned microbatches, `ranges` of the rows of `ids [B]`."""
    sizes = torch.tensor([end - start for start, end in ranges])
    microbatch = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    pairs = torch.stack((ids[: len(microbatch)].to("cpu", torch.int64), microbatch)).unique(dim=1)[0]
    divided = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(divided):
        raise BatchError(
            f"group {int(divided[0])} is divided over several planned microbatches, but the loss needs whole groups; "
            f"plan them with group_ids_key={GROUP_IDS!r}"
        )
