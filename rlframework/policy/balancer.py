"""Assignment of a batch's rows to data-parallel ranks, so that no rank waits for another.

The batching mode plans microbatches for all ranks at once: each rank gets the same number of microbatches, of similar
cost at each step and in total. Rows that it does not plan, such as padded ones, are sharded in order. If an engine
needs more microbatches (a pipeline schedule), its worker adds dummies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlframework.batch.batched_data_dict import BatchedDataDict, SlicedDataDict
from rlframework.batch.packing import TokenCost
from rlframework.interfaces.data_processor import Batching, MicrobatchRule
from rlframework.policy.microbatches.global_batch import rows_to_plan


@dataclass(frozen=True)
class BatchBalancer:
    """Shards batches over `ranks` data-parallel ranks.

    `batching`: how workers make microbatches, within the `rule` of their engine. `preferred_tokens`: default tokens per
    microbatch. `cost`: cost of a row as a function of its tokens.
    """

    ranks: int
    batching: Batching
    preferred_tokens: int
    cost: TokenCost
    rule: MicrobatchRule

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
        batching, rule = self.batching.for_rows(data, self.rule), self.rule
        rows = rows_to_plan(data, positions, groups=grouped_rows is not None)
        limits = batching.limits(
            rows, rule, most_rows=grouped_rows or 1, tokens=tokens, preferred=self.preferred_tokens
        )
        batching.check(rows, limits, rule)
        if self.ranks == 1:
            return [data.slice(0, data.size)], None
        plans = batching.plan_ranks(rows, limits, rule, ranks=self.ranks, batch_size=batch_size, cost=self.cost)
        if plans is None:
            return data.shard_by_batch_size(self.ranks, batch_size=batch_size), None
        return data.shard_by_plan(plans)
