"""A data processor that runs the largest microbatches first, so that a lack of memory shows immediately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlframework.policy.microbatches.data_processor import MicrobatchProcessor

if TYPE_CHECKING:
    import torch
    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.data_processor import BatchPlan, Microbatch, MicrobatchRule


class LongestFirst(MicrobatchProcessor):
    """Sorts core's microbatches. Any order is valid, as `Microbatch.rows` assigns results to rows."""

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
        if data.plan is not None:  # keep the driver's plan, which balances the ranks
            return found
        return sorted(found, key=lambda one: one.processed_inputs.input_ids.numel(), reverse=True)
