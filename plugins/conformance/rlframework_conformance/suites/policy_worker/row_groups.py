"""Contract 13: rows of a group share a microbatch, compared with the oracle's single batch."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.policy_worker.worker_harness import PolicyHarness

GROUPS = (5, 9, 2, 5, 9, 5, 2, 7)
"""Ids of eight rows: groups of three, two, two and one row, mixed. Row 1 of the batch is masked."""


def _batch(harness: PolicyHarness) -> BatchedDataDict[Any]:
    data = harness.batch()
    data["group_ids"] = torch.tensor(GROUPS)
    return data


class GroupedRows(Suite):
    """A step of a loss with `needs_groups` on pairs of rows: its value depends on whole groups and on their order."""

    @holds(13)
    def test_groups_share_a_padded_microbatch(self, harness: PolicyHarness) -> None:
        """Padded microbatches of three or eight rows must have whole groups; the first has room for the largest."""
        for rows in (3, 8):
            harness.first_step(_batch(harness), f"pairs in {rows} rows", kind="pairs", train_micro_batch_size=rows)

    @holds(13, Capability.DYNAMIC_BATCHING)
    def test_groups_share_a_dynamic_microbatch(self, harness: PolicyHarness) -> None:
        """Dynamic microbatches must have whole groups; 48 tokens have room for three rows of full width, padded."""
        batching = {"mode": "dynamic", "tokens": 48}
        harness.first_step(_batch(harness), "pairs, dynamic", kind="pairs", batching=batching)

    @holds(13, Capability.PACKING)
    def test_groups_share_a_packed_microbatch(self, harness: PolicyHarness) -> None:
        """Packed microbatches must have whole groups."""
        batching = {"mode": "packed", "tokens": 48}
        harness.first_step(_batch(harness), "pairs, packed", kind="pairs", batching=batching)
