"""Which rows of a batch go to which data-parallel rank, so that no rank waits for another.

With packed and dynamic microbatches the driver plans them for all ranks at once: equally many a rank, of like cost at
each step, and rank sums of like cost. Padded microbatches are dealt in the order of the rows. Engines that ask for
more microbatches than that (a pipeline's schedule) get dummies from their worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packed_tensor import has_media
from rlframework.batch.packing import TokenCost
from rlframework.batch.packing.lengths import round_up
from rlframework.microbatches.row_checks import check_contents, check_fits, check_rows, rows_with_targets

PLANNED = "planned_lengths"
"""The key that the plan is made from; it never reaches a worker."""


@dataclass(frozen=True)
class Dealer:
    """Deals to `ranks` data-parallel ranks; `mode`: padded, dynamic or packed, as the workers make microbatches.

    `preferred_tokens`: of a microbatch, where nobody says; `cost` of a row by its tokens; `pad_multiple`: what the
    engine pads lengths to; `vocabulary`: tokens that the model has embeddings for, where that is known.
    """

    ranks: int
    mode: str
    preferred_tokens: int
    cost: TokenCost
    pad_multiple: int = 1
    vocabulary: int | None = None

    def deal(
        self, data: BatchedDataDict[Any], *, batch_size: int | None, positions: str, tokens: int | None
    ) -> tuple[list[SlicedDataDict[Any]], list[int] | None]:
        """The shards, and what `reorder_data` takes to bring their joined results into the order of `data`.

        Every `batch_size` rows (None: all) are one global batch. `positions` as for `DataProcessor.microbatches`: a row
        without any takes no room. `tokens`: most in a microbatch. No indices (None) where the order is kept.
        """
        check_rows(data)
        check_contents(data, self.vocabulary)
        work = rows_with_targets(data, positions)
        if self.ranks == 1:
            return [data.slice(0, data.size)], None
        mode = "dynamic" if self.mode == "packed" and has_media(data) else self.mode
        if mode == "padded":
            return data.shard_by_batch_size(self.ranks, batch_size=batch_size), None
        lengths = data["input_lengths"] * work
        longest = round_up(int(lengths.max()), self.pad_multiple)
        most = tokens or max(self.preferred_tokens, longest)
        check_fits(longest, mode, most)
        planned: BatchedDataDict[Any] = BatchedDataDict({**data, PLANNED: lengths})
        common: Any = {
            "max_tokens_per_microbatch": most if mode == "dynamic" else most // self.pad_multiple * self.pad_multiple,
            "input_key": "input_ids",
            "input_lengths_key": PLANNED,
            "algorithm": "balanced",
            "cost": self.cost,
        }
        args: dict[str, Any] = (
            {"sequence_packing_args": {**common, "sequence_length_pad_multiple": 1}}
            if mode == "packed"
            else {"dynamic_batching_args": {**common, "sequence_length_round": self.pad_multiple}}
        )
        shards, order = planned.shard_by_batch_size(self.ranks, batch_size=batch_size, **args)
        for shard in shards:
            del shard[PLANNED]
        return shards, order
