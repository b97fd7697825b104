"""Reduction of metrics over microbatches and data-parallel ranks, in at most two collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.collectives import max_over_ranks, sum_over_ranks


def reduce_metrics(parts: Sequence[Mapping[str, Any]], group: Any, device: torch.device) -> dict[str, float]:
    """Reduce the metrics of microbatches to those of a global batch.

    Values are sums that are already divided by global counts, so they are added; names ending in `_min` or `_max` are
    reduced by minimum or maximum. A rank without real microbatches contributes nothing; names may differ between ranks.
    """
    names = _all_names(sorted({name for part in parts for name in part} | {"loss"}), group)
    sums = [name for name in names if not name.endswith(("_min", "_max"))]
    extremes = [name for name in names if name.endswith(("_min", "_max"))]
    totals = sum_over_ranks(_table(parts, sums, torch.zeros(len(sums)), device).sum(0), group)
    metrics = dict(zip(sums, totals.tolist(), strict=True))
    if extremes:
        signs = [1.0 if name.endswith("_max") else -1.0 for name in extremes]
        absent = torch.tensor([-math.inf * sign for sign in signs])
        extreme = (_table(parts, extremes, absent, device) * torch.tensor(signs, device=device)).amax(0)
        extreme = max_over_ranks(extreme, group)
        metrics.update(
            {name: sign * value for name, sign, value in zip(extremes, signs, extreme.tolist(), strict=True)}
        )
    return metrics


def average_metrics(batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of several batches, each over the batches that have it.

    Names ending in `_min` and `_max` are reduced by minimum and maximum.
    """
    names = sorted({name for batch in batches for name in batch})
    values = {name: [batch[name] for batch in batches if name in batch] for name in names}
    kinds: dict[str, Callable[[list[float]], float]] = {"_min": min, "_max": max}
    return {name: kinds.get(name[-4:], _mean)(present) for name, present in values.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _all_names(names: list[str], group: Any) -> list[str]:
    if group is None:
        return names
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, names, group=group)
    return sorted({name for names in gathered for name in names})


def _table(parts: Sequence[Mapping[str, Any]], names: Sequence[str], absent: Tensor, device: torch.device) -> Tensor:
    """`[parts + 1, names]` float64 on `device`; `absent` where a part lacks a name, and in the last row."""
    table = torch.empty((len(parts) + 1, len(names)), dtype=torch.float64, device=device)
    table[:] = absent.to(device)
    for row, part in enumerate(parts):
        for column, name in enumerate(names):
            if name in part:
                table[row, column] = part[name]
    return table
