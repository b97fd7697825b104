"""Metrics of microbatches summed up over microbatches and data-parallel ranks, in two collectives at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def sum_over_ranks(values: Tensor, group: Any) -> Tensor:
    """`values` summed over `group` in place; as they are when `group` is None."""
    if group is not None:
        torch.distributed.all_reduce(values, group=group)
    return values


def reduce_metrics(parts: Sequence[Mapping[str, Any]], group: Any, device: torch.device) -> dict[str, float]:
    """The metrics of a global batch from those of its microbatches.

    Values are sums already divided by global counts, so they add up; names that end in `_min` or `_max` are combined
    by minimum or maximum. A rank without real microbatches takes part with nothing; names need not agree over ranks.
    """
    names = _all_names(sorted({name for part in parts for name in part} | {"loss"}), group)
    sums = [name for name in names if not name.endswith(("_min", "_max"))]
    extremes = [name for name in names if name.endswith(("_min", "_max"))]
    totals = sum_over_ranks(_stack([_column(parts, name).sum() for name in sums], device), group)
    metrics = dict(zip(sums, totals.tolist(), strict=True))
    if extremes:
        signs = [1.0 if name.endswith("_max") else -1.0 for name in extremes]
        most = _stack([_largest(parts, name, sign) for name, sign in zip(extremes, signs, strict=True)], device)
        if group is not None:
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
        metrics.update({name: sign * value for name, sign, value in zip(extremes, signs, most.tolist(), strict=True)})
    return metrics


def _all_names(names: list[str], group: Any) -> list[str]:
    if group is None:
        return names
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, names, group=group)
    return sorted({name for names in gathered for name in names})


def _column(parts: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    values = [
        torch.as_tensor(part[name], dtype=torch.float64).detach().reshape(()).cpu() for part in parts if name in part
    ]
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def _largest(parts: Sequence[Mapping[str, Any]], name: str, sign: float) -> Tensor:
    column = _column(parts, name) * sign
    return column.max() if column.numel() else torch.tensor(-float("inf"), dtype=torch.float64)


def _stack(values: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack(list(values)).to(device)
