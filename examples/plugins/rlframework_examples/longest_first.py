"""A data processor: core's microbatches, those with most tokens first, so that too little memory shows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlframework.microbatches.data_processor import MicrobatchProcessor

if TYPE_CHECKING:
    import torch
    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.data_processor import BatchPlan, Microbatch, MicrobatchRule


class LongestFirst(MicrobatchProcessor):
    """Results find their rows by `Microbatch.rows`, so the order of microbatches is free."""

    def microbatches(
        self,
        data: BatchedDataDict[Any],
        plan: BatchPlan,
        rule: MicrobatchRule,
        *,
        positions: str,
        device: torch.device,
    ) -> Sequence[Microbatch]:
        """See `DataProcessor.microbatches`."""
        found = super().microbatches(data, plan, rule, positions=positions, device=device)
        if data.micro_batch_indices is not None:  # planned by the driver, so that ranks do not wait: kept
            return found
        return sorted(found, key=lambda one: one.processed_inputs.input_ids.numel(), reverse=True)
