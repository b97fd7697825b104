"""Numbers that the ranks of a process group agree on, on whatever device the group's backend serves.

Rows and objects of different sizes are gathered in `rlframework.distributed.collectives`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def group_device(group: dist.ProcessGroup | None, preferred: torch.device | None = None) -> torch.device:
    """`preferred` where the backend of `group` (None: the default group) serves it; else a device that it does."""
    served = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if preferred is not None and preferred.type in served:
        return preferred
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.accelerator.current_device_index())


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of `values` over `group`, on their device; as they are when `group` is None. May change `values`."""
    return values if group is None else _reduce(values, dist.ReduceOp.SUM, group)


def max_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The largest of `values` over `group`, one by one; see `sum_over_ranks`."""
    return values if group is None else _reduce(values, dist.ReduceOp.MAX, group)


def _reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    shared = values.to(group_device(group, values.device))
    dist.all_reduce(shared, op=op, group=group)
    return shared.to(values.device)
