"""Assigning rows to microbatches: sequence packing, dynamic batching, and the assignment of both to shards.

Everything in this package works on row lengths alone. `BatchedDataDict.shard_by_batch_size` moves the rows, and the
data processor joins the tokens of packed rows.
"""

from __future__ import annotations

import difflib
from typing import Any

from rlframework.batch.packing.balanced import BalancedPacker
from rlframework.batch.packing.cost import TokenCost, read_cost
from rlframework.batch.packing.dynamic import balanced_microbatches, round_robin_microbatches
from rlframework.batch.packing.first_fit import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
)
from rlframework.batch.packing.metrics import PackingMetrics, PackingStats, Spread
from rlframework.batch.packing.packer import PackingAlgorithm, SequencePacker
from rlframework.errors import BatchError, BatchTypeError

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

    See `SequencePacker` for the positional arguments. Only BALANCED uses `cost`, the cost of a row; only
    FIRST_FIT_SHUFFLE uses `seed` (None: draw from Python's global generator). Raises `BatchError` for an unknown name.
    """
    kind = read_algorithm(algorithm)
    common = (bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
    cost = read_cost(cost)
    match kind:
        case PackingAlgorithm.CONCATENATIVE:
            return ConcatenativePacker(*common)
        case PackingAlgorithm.FIRST_FIT_DECREASING:
            return FirstFitDecreasingPacker(*common)
        case PackingAlgorithm.FIRST_FIT_SHUFFLE:
            return FirstFitShufflePacker(*common, seed=seed)
        case PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING:
            return ModifiedFirstFitDecreasingPacker(*common)
        case PackingAlgorithm.BALANCED:
            return BalancedPacker(*common, cost=cost)


def read_algorithm(algorithm: PackingAlgorithm | str | Any) -> PackingAlgorithm:
    """Return the algorithm of this name, in any case, or `algorithm` itself; raise `BatchError` listing the names."""
    if isinstance(algorithm, PackingAlgorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise BatchTypeError(f"algorithm must be a PackingAlgorithm or its name, got a {type(algorithm).__name__}")
    names = list(PackingAlgorithm.__members__)
    if algorithm.upper() in names:
        return PackingAlgorithm[algorithm.upper()]
    near = difflib.get_close_matches(algorithm.upper(), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise BatchError(f"unknown packing algorithm {algorithm!r}.{hint} Use one of {', '.join(names)}, in any case.")
