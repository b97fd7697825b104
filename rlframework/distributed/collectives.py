"""Gathers over the ranks of a process group whose ranks hold different numbers of rows; any device, any backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlframework.distributed import batch_rows
from rlframework.errors import BatchError


def gather_jagged_object_lists(local_objects: list[Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """The lists of all ranks joined in rank order, the same on every rank."""
    return [item for items in _gather_objects(local_objects, group) for item in items]


def rebalance_nd_tensor(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The rows of all ranks joined on dimension 0 in rank order, the same on every rank, on the device of `tensor`.

    Dtype and the dimensions from 1 on must agree on all ranks that have rows; otherwise every rank raises `BatchError`.
    """
    shapes = _gather_objects((tuple(tensor.shape), tensor.dtype), group)
    return _gather_rows("tensor", tensor, shapes, group)


def all_gather_batch(data: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """For each key, the rows of all ranks in rank order. A rank without rows may lack keys.

    One exchange of objects carries shapes and lists; then one exchange of bytes for each tensor key. All ranks see the
    same shapes before any tensor moves, so what is wrong on one rank is raised on all of them.
    """
    headers = _gather_objects(_describe(data), group)
    problem = next((header for header in headers if isinstance(header, str)), None)
    if problem is not None:
        raise BatchError(problem)
    gathered: dict[str, Any] = {}
    for key in sorted({key for header in headers for key in header}, key=str):
        entries = [header.get(key) for header in headers]
        _check_entries(key, entries, headers)
        if all(entry is None or isinstance(entry, list) for entry in entries):
            gathered[key] = [item for entry in entries for item in entry or []]
            continue
        shapes = [entry or None for entry in entries]
        known = next(shape for shape in shapes if shape)
        local = data.get(key)
        if not isinstance(local, torch.Tensor):
            local = torch.empty((0, *known[0][1:]), dtype=known[1], device=_exchange_device(None, group))
        gathered[key] = _gather_rows(key, local, [shape or ((0,), known[1]) for shape in shapes], group)
    return gathered


def _describe(data: Mapping[str, Any]) -> dict[str, Any] | str:
    """Lists as they are and `(shape, dtype)` of tensors; or what is wrong, so that other ranks do not wait."""
    try:
        batch_rows.count_rows(data)
    except BatchError as error:
        return f"rank {dist.get_rank()}: {error}"
    return {k: v if isinstance(v, list) else (tuple(v.shape), v.dtype) for k, v in data.items()}


def _check_entries(key: str, entries: Sequence[Any], headers: Sequence[Mapping[str, Any]]) -> None:
    lacking = [rank for rank, entry in enumerate(entries) if entry is None and _rows_of(headers[rank])]
    if lacking:
        raise BatchError(f"all_gather: key {key!r} is missing on rank {', '.join(map(str, lacking))} of {len(entries)}")
    kinds = {type(entry) for entry in entries if entry}
    if len(kinds) > 1:
        raise BatchError(f"all_gather: {key!r} is a list on some ranks and a tensor on others")


def _rows_of(header: Mapping[str, Any]) -> int:
    return max((len(entry) if isinstance(entry, list) else entry[0][0] for entry in header.values()), default=0)


def _gather_rows(
    key: str,
    tensor: torch.Tensor,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Exchange bytes, padded to the largest share: one path for every dtype, also those a backend cannot reduce."""
    filled = [(shape, dtype) for shape, dtype in shapes if shape[0]]
    if len({(shape[1:], dtype) for shape, dtype in filled}) > 1:
        raise BatchError(f"all_gather: {key!r} differs between ranks in more than the number of rows: {shapes}")
    if not filled:
        return tensor
    row_shape, dtype = filled[0][0][1:], filled[0][1]
    row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
    counts = [shape[0] for shape, _ in shapes]
    device = _exchange_device(tensor, group)
    share = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8, device=device)
    own = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    share[: own.numel()] = own
    shares = [torch.empty_like(share) for _ in counts]
    dist.all_gather(shares, share, group=group)
    joined = torch.cat([part[: count * row_bytes] for part, count in zip(shares, counts, strict=True)])
    return joined.view(dtype).reshape(sum(counts), *row_shape).to(tensor.device)


def _gather_objects(item: Any, group: dist.ProcessGroup | None) -> list[Any]:
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items


def _exchange_device(tensor: torch.Tensor | None, group: dist.ProcessGroup | None) -> torch.device:
    """The device of `tensor` where the group's backend serves it; otherwise one that it serves."""
    served = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if tensor is not None and tensor.device.type in served:
        return tensor.device
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.accelerator.current_device_index())
