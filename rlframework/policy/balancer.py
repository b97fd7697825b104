"""Assignment of a batch's rows to data-parallel ranks, so that no rank waits for another.

With packed and dynamic microbatches the driver plans them for all ranks at once: each rank gets the same number of
microbatches, of similar cost at each step and in total. Padded microbatches are sharded in row order. If an engine
needs more microbatches (a pipeline schedule), its worker adds dummies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import has_media
from rlframework.batch.packing import TokenCost
from rlframework.microbatches.global_batch import check_fits, rows_with_targets
from rlframework.microbatches.shapes import Padding

PLANNED_LENGTHS = "planned_lengths"
"""Key of the lengths that the plan is based on; it never reaches a worker."""


@dataclass(frozen=True)
class BatchBalancer:
    """Shards batches over `ranks` data-parallel ranks.

    `mode`: how workers make microbatches, padded, dynamic or packed. `preferred_tokens`: default tokens per microbatch.
    `cost`: cost of a row as a function of its tokens. `pad_multiple`: multiple to which the engine pads lengths.
    `few_shapes`: see `MicrobatchRule`.
    """

    ranks: int
    mode: str
    preferred_tokens: int
    cost: TokenCost
    pad_multiple: int = 1
    few_shapes: bool = False

    def shard(
        self, data: BatchedDataDict[Any], *, batch_size: int | None, positions: str, tokens: int | None
    ) -> tuple[list[SlicedDataDict[Any]], list[int] | None]:
        """Return one shard per rank, and the indices with which `reorder_data` restores the row order of results.

        Every `batch_size` rows (None: all rows) are one global batch. `positions`: as for `DataProcessor.microbatches`;
        a row without any counts as empty. `tokens`: maximum per microbatch. The indices are None if the order is
        unchanged. Raises a `BatchError` for rows longer than `tokens`, and for `positions` that need a missing mask.
        """
        work = rows_with_targets(data, positions)
        mode = "dynamic" if self.mode == "packed" and has_media(data) else self.mode
        lengths = data["input_lengths"] * work
        longest = Padding(self.pad_multiple, self.few_shapes).width(int(lengths.max()))
        most = tokens or max(self.preferred_tokens, longest)
        padding = Padding(self.pad_multiple, self.few_shapes, most)
        longest = padding.width(int(lengths.max()))
        if mode != "padded":
            check_fits(longest, mode, most)
        if self.ranks == 1:
            return [data.slice(0, data.size)], None
        if mode == "padded":
            return data.shard_by_batch_size(self.ranks, batch_size=batch_size), None
        if self.few_shapes and mode == "dynamic":
            columns = data["input_ids"].shape[1]
            widths = torch.tensor([min(padding.width(length), columns) for length in lengths.tolist()])
            lengths = widths.where(lengths > 0, 0)
            most = most * columns // max(longest, columns)  # the planner knows no rows wider than the batch
        planned: BatchedDataDict[Any] = BatchedDataDict({**data, PLANNED_LENGTHS: lengths})
        plan: Any = {
            "input_key": "input_ids",
            "input_lengths_key": PLANNED_LENGTHS,
            "algorithm": "balanced",
            "cost": self.cost,
        }
        if mode == "packed":
            most -= most % self.pad_multiple
            plan |= {"max_tokens_per_microbatch": most, "sequence_length_pad_multiple": 1}
            args: Any = {"sequence_packing_args": plan}
        else:
            plan |= {"max_tokens_per_microbatch": most, "sequence_length_round": self.pad_multiple}
            args = {"dynamic_batching_args": plan}
        shards, order = planned.shard_by_batch_size(self.ranks, batch_size=batch_size, **args)
        for shard in shards:
            del shard[PLANNED_LENGTHS]
        return shards, order
