"""Assignment of a batch's rows to data-parallel ranks, so that no rank waits for another.

With packed and dynamic microbatches the driver plans them for all ranks at once: each rank gets the same number of
microbatches, of similar cost at each step and in total. Padded microbatches are sharded in row order. If an engine
needs more microbatches (a pipeline schedule), its worker adds dummies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batch_rows import round_up
from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import has_media
from rlframework.batch.packing import TokenCost
from rlframework.interfaces.loss import GROUP_IDS
from rlframework.policy.microbatches.global_batch import check_fits, rows_with_targets
from rlframework.policy.microbatches.row_groups import check_groups_fit, least_tokens, read_group_ids, with_whole_groups
from rlframework.policy.microbatches.shapes import Padding

PLANNED_LENGTHS = "planned_lengths"
"""Key of the lengths that the plan is based on; it never reaches a worker."""


@dataclass(frozen=True)
class BatchBalancer:
    """Shards batches over `ranks` data-parallel ranks.

    `mode`: how workers make microbatches, padded, dynamic or packed. `preferred_tokens`: default tokens per microbatch.
    `cost`: cost of a row as a function of its tokens. `pad_multiple`: multiple to which the engine pads lengths.
    `few_shapes`, `packs_media`: see `MicrobatchRule`.
    """

    ranks: int
    mode: str
    preferred_tokens: int
    cost: TokenCost
    pad_multiple: int = 1
    few_shapes: bool = False
    packs_media: bool = False

    def shard(
        self,
        data: BatchedDataDict[Any],
        *,
        batch_size: int | None,
        positions: str,
        tokens: int | None,
        grouped_rows: int | None = None,
    ) -> tuple[list[SlicedDataDict[Any]], list[int] | None]:
        """Return one shard per rank, and the indices with which `reorder_data` restores the row order of results.

        Every `batch_size` rows (None: all rows) are one global batch. `positions`: as for `DataProcessor.microbatches`;
        a row without any counts as empty. `tokens`: maximum per microbatch. The indices are None if the order is
        unchanged. Raises a `BatchError` for rows longer than `tokens`, and for `positions` that need a missing mask.

        With `grouped_rows`, the rows of a padded microbatch, rows with equal `group_ids` share a microbatch. Then
        padded microbatches are planned too, balanced by rows. Raises a `BatchError` for groups that exceed one.
        """
        work, ids = rows_with_targets(data, positions), None
        mode = "dynamic" if self.mode == "packed" and has_media(data) and not self.packs_media else self.mode
        if grouped_rows is not None:
            work, ids = with_whole_groups(work, data), read_group_ids(data)
        lengths = data["input_lengths"] * work
        most = tokens or max(
            self.preferred_tokens, least_tokens(lengths, Padding(self.pad_multiple, self.few_shapes), mode, ids)
        )
        padding = Padding(self.pad_multiple, self.few_shapes, most)
        longest = padding.width(int(lengths.max()))
        if mode != "padded":
            check_fits(longest, mode, most)
        if mode == "packed":
            most -= most % self.pad_multiple
        if ids is not None and grouped_rows is not None:
            widths = lengths.tolist()
            if mode == "dynamic":
                widths = [round_up(length, self.pad_multiple) for length in widths]
            check_groups_fit(ids, widths, mode, grouped_rows if mode == "padded" else most)
        if self.ranks == 1:
            return [data.slice(0, data.size)], None
        if mode == "padded":
            if grouped_rows is None:
                return data.shard_by_batch_size(self.ranks, batch_size=batch_size), None
            return self._planned(data, "packed", work.to(torch.int64), grouped_rows, batch_size, ids)
        if self.few_shapes and mode == "dynamic" and ids is None:
            columns = data["input_ids"].shape[1]
            widths = torch.tensor([min(padding.width(length), columns) for length in lengths.tolist()])
            lengths = widths.where(lengths > 0, 0)
            most = most * columns // max(longest, columns)  # the planner knows no rows wider than the batch
        return self._planned(data, mode, lengths, most, batch_size, ids)

    def _planned(
        self,
        data: BatchedDataDict[Any],
        mode: str,
        lengths: Tensor,
        most: int,
        batch_size: int | None,
        ids: Tensor | None,
    ) -> tuple[list[SlicedDataDict[Any]], list[int]]:
        """Shard `data` by a plan of microbatches of at most `most` tokens, for rows that count as `lengths [B]`."""
        planned: BatchedDataDict[Any] = BatchedDataDict({**data, PLANNED_LENGTHS: lengths})
        plan: Any = {
            "input_key": "input_ids",
            "input_lengths_key": PLANNED_LENGTHS,
            "algorithm": "balanced",
            "cost": self.cost,
        }
        if ids is not None:
            plan["group_ids_key"] = GROUP_IDS
        if mode == "packed":
            plan |= {"max_tokens_per_microbatch": most, "sequence_length_pad_multiple": 1}
            args: Any = {"sequence_packing_args": plan}
        else:
            plan |= {"max_tokens_per_microbatch": most, "sequence_length_round": self.pad_multiple}
            args = {"dynamic_batching_args": plan}
        shards, order = planned.shard_by_batch_size(self.ranks, batch_size=batch_size, **args)
        for shard in shards:
            del shard[PLANNED_LENGTHS]
        return shards, order
