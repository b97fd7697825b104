"""The default data processor: splits a worker's rows, text or multimodal, into microbatches of any batching mode.

NeMo-RL's functions for the same purpose are in `nemo_rl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlframework.base.errors import BatchError
from rlframework.interfaces.data_processor import (
    Batching,
    BatchPlan,
    DataProcessor,
    GlobalBatch,
    Microbatch,
    MicrobatchRule,
    RowsToPlan,
)
from rlframework.policy.microbatches.global_batch import process_global_batch
from rlframework.policy.microbatches.on_demand import Made, on_device
from rlframework.policy.microbatches.row_groups import check_planned, rows_to_plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.loss import LossFunction


class MicrobatchProcessor(DataProcessor):
    """Makes microbatches of token rows and their accompanying values, for any causal language model."""

    def process_global_batch(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        dp_group: ProcessGroup | None,
        *,
        batch_idx: int,
        batch_size: int | None,
    ) -> GlobalBatch:
        """See `DataProcessor.process_global_batch`."""
        return process_global_batch(data, loss_fn, dp_group, batch_idx=batch_idx, batch_size=batch_size)

    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, rule: MicrobatchRule, *, positions: str, device: torch.device
    ) -> Sequence[Microbatch]:
        """See `DataProcessor.microbatches`."""
        batching = self.batching(plan.mode)
        groups = rows_by_microbatch(rows_to_plan(data, positions, groups=plan.groups), batching, plan, rule)
        if problem := batching.fits(data, rule):
            raise BatchError(problem)

        def make(index: int) -> Microbatch:
            return batching.make(data, groups[index], plan, rule, positions)

        return on_device(Made(len(groups), make), device)


def rows_by_microbatch(
    rows: RowsToPlan, batching: Batching, limits: BatchPlan, rule: MicrobatchRule
) -> list[torch.Tensor]:
    """Return the rows that are computed, by microbatch: as the driver has planned, or else as `batching` plans."""
    plan = rows.data.plan
    if plan is None or plan.micro_batch_indices is None or not batching.keeps_plan(limits):
        batching.check(rows, limits, rule)
        return batching.plan(rows, limits, rule).microbatches()
    groups = plan.microbatches()
    if rows.group_ids is not None:
        check_planned(groups, rows.group_ids)
    return [computed for group in groups if len(computed := group[rows.wanted[group]])]
