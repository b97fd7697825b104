"""Metrics of microbatches summed up over microbatches and data-parallel ranks, in two collectives at most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.collectives import max_over_ranks, sum_over_ranks


def reduce_metrics(parts: Sequence[Mapping[str, Any]], group: Any, device: torch.device) -> dict[str, float]:
    """The metrics of a global batch from those of its microbatches.

    Values are sums already divided by global counts, so they add up; names that end in `_min` or `_max` are combined
    by minimum or maximum. A rank without real microbatches takes part with nothing; names need not agree over ranks.
    """
    names = _all_names(sorted({name for part in parts for name in part} | {"loss"}), group)
    sums = [name for name in names if not name.endswith(("_min", "_max"))]
    extremes = [name for name in names if name.endswith(("_min", "_max"))]
    totals = sum_over_ranks(_table(parts, sums, torch.zeros(len(sums)), device).sum(0), group)
    metrics = dict(zip(sums, totals.tolist(), strict=True))
    if extremes:
        signs = [1.0 if name.endswith("_max") else -1.0 for name in extremes]
        absent = torch.tensor([-math.inf * sign for sign in signs])
        most = (_table(parts, extremes, absent, device) * torch.tensor(signs, device=device)).amax(0)
        most = max_over_ranks(most, group)
        metrics.update({name: sign * value for name, sign, value in zip(extremes, signs, most.tolist(), strict=True)})
    return metrics


def average_metrics(batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several batches as one: means, extremes for `_min` and `_max`; each over the batches that have it."""
    names = sorted({name for batch in batches for name in batch})
    values = {name: [batch[name] for batch in batches if name in batch] for name in names}
    return {name: _combine(name, found) for name, found in values.items()}


def _combine(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return min(values) if name.endswith("_min") else sum(values) / len(values)


def _all_names(names: list[str], group: Any) -> list[str]:
    if group is None:
        return names
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, names, group=group)
    return sorted({name for names in gathered for name in names})


def _table(parts: Sequence[Mapping[str, Any]], names: Sequence[str], absent: Tensor, device: torch.device) -> Tensor:
    """`[parts + 1, names]` float64 on `device`, `absent` where a part lacks a name, and in the last row."""
    table = torch.empty((len(parts) + 1, len(names)), dtype=torch.float64, device=device)
    table[:] = absent.to(device)
    for row, part in enumerate(parts):
        for column, name in enumerate(names):
            if name in part:
                table[row, column] = part[name]
    return table
