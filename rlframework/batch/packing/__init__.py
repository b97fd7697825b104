"""Assigning rows to microbatches: sequence packing, dynamic batching, and the assignment of both to shards.

Everything in this package works on row lengths alone. `BatchedDataDict.shard_by_batch_size` moves the rows, and the
data processor joins the tokens of packed rows.
"""

from __future__ import annotations

from rlframework.batch.packing.balanced import BalancedPacker
from rlframework.batch.packing.dynamic import balanced_microbatches, round_robin_microbatches
from rlframework.batch.packing.first_fit import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
)
from rlframework.batch.packing.lengths import TokenCost
from rlframework.batch.packing.packer import (
    PackingAlgorithm,
    PackingMetrics,
    PackingStats,
    SequencePacker,
    Spread,
    read_algorithm,
)

__all__ = [
    "BalancedPacker",
    "ConcatenativePacker",
    "FirstFitDecreasingPacker",
    "FirstFitShufflePacker",
    "ModifiedFirstFitDecreasingPacker",
    "PackingAlgorithm",
    "PackingMetrics",
    "PackingStats",
    "SequencePacker",
    "Spread",
    "TokenCost",
    "balanced_microbatches",
    "get_packer",
    "read_algorithm",
    "round_robin_microbatches",
]

PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm.BALANCED: BalancedPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    cost: TokenCost | None = None,
    seed: int | None = None,
) -> SequencePacker:
    """Construct the packer for `algorithm`, a `PackingAlgorithm` or its name in any case.

    See `SequencePacker` for the other arguments. Raises `BatchError` for an unknown name.
    """
    packer = PACKERS[read_algorithm(algorithm)]
    return packer(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple, cost=cost, seed=seed)
