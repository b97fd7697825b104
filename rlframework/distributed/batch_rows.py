"""What `BatchedDataDict` does to one value: count, cut, pick, join and pad its rows.

A value is a tensor with the batch on dimension 0, or a list with one element a row. Multimodal values are not here yet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from rlframework.errors import BatchError, BatchTypeError

Rows = torch.Tensor | list[Any]
"""A value of a batch."""


def as_rows(key: Any, value: Any) -> Rows:
    """`value` if it has rows; otherwise a `BatchTypeError` that names `key`."""
    if isinstance(value, list):
        return value
    if not isinstance(value, torch.Tensor):
        raise BatchTypeError(
            f"the value of {key!r} is a {type(value).__name__}; a batch holds tensors with the batch on dimension 0 "
            "and lists with one element a row: convert it, or keep it outside the batch"
        )
    if value.ndim == 0:
        raise BatchTypeError(f"the value of {key!r} is a tensor without dimensions; dimension 0 must be the batch")
    return value


def count_rows(data: Mapping[Any, Any], what: str = "the batch") -> int:
    """The common number of rows of all values, 0 without keys; a `BatchError` with all counts when they differ."""
    counts = {key: len(as_rows(key, value)) for key, value in data.items()}
    if len(set(counts.values())) > 1:
        raise BatchError(f"all values of {what} must have the same number of rows (dimension 0), got {counts}")
    return next(iter(counts.values()), 0)


def pick_rows(value: Rows, indices: torch.Tensor) -> Rows:
    """A copy of the rows at `indices` (int64, none negative), in their order."""
    if isinstance(value, torch.Tensor):
        return value.index_select(0, indices.to(value.device))
    return [value[index] for index in indices.tolist()]


def join_blocks(value: Rows, blocks: Iterable[tuple[int, int]]) -> Rows:
    """A copy of the rows of the `[start, end)` blocks, one after the other. Each byte is copied once."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value[start:end] for start, end in blocks])
    return [item for start, end in blocks for item in value[start:end]]


def repeat_rows(value: Rows, repeats: int) -> Rows:
    """Each row `repeats` times in a row; elements of lists are independent copies."""
    if isinstance(value, torch.Tensor):
        return value.repeat_interleave(repeats, dim=0)
    return [copy.deepcopy(item) for item in value for _ in range(repeats)]


def concatenate(key: Any, values: Sequence[Any], pad_value: float) -> Rows:
    """All rows of `values`, in order.

    Lists are joined; 1-D tensors are joined; 2-D tensors are padded on the right to the longest row; more dimensions
    keep their shape and are padded on dimension 1. A 1-D tensor among 2-D ones counts as rows of one element. Values
    without rows do not widen the others. Tensors must share their device and the dimensions from 2 on.
    """
    rows = [as_rows(key, value) for value in values]
    rows = [value for value in rows if len(value)] or rows
    tensors = [value for value in rows if isinstance(value, torch.Tensor)]
    if not tensors:
        return [item for value in rows for item in value]
    if len(tensors) < len(rows):
        raise BatchTypeError(f"the values of {key!r} are tensors in some batches and lists in others; use one kind")
    if all(tensor.ndim == 1 for tensor in tensors):
        _check_joinable(key, tensors)
        return torch.cat(tensors)
    tensors = [tensor.unsqueeze(1) if tensor.ndim == 1 else tensor for tensor in tensors]
    _check_joinable(key, tensors)
    return _pad_and_join(tensors, pad_value)


def _check_joinable(key: Any, tensors: Sequence[torch.Tensor]) -> None:
    if len({(tensor.ndim, tensor.shape[2:]) for tensor in tensors}) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise BatchError(
            f"the values of {key!r} cannot be joined: shapes {shapes}; only dimensions 0 (the batch) and 1 (the "
            "sequence) may differ"
        )
    if len({tensor.device for tensor in tensors}) > 1:
        devices = sorted({str(tensor.device) for tensor in tensors})
        raise BatchError(f"the values of {key!r} lie on several devices {devices}; move them to one with `.to(device)`")


def _pad_and_join(tensors: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    width = max(tensor.shape[1] for tensor in tensors)
    if all(tensor.shape[1] == width for tensor in tensors):
        return torch.cat(list(tensors))
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    shape = (sum(len(tensor) for tensor in tensors), width, *tensors[0].shape[2:])
    joined = torch.empty(shape, dtype=dtype, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        end = start + len(tensor)
        joined[start:end, : tensor.shape[1]] = tensor
        joined[start:end, tensor.shape[1] :] = pad_value
        start = end
    return joined


def without_unused_storage(value: Any) -> Any:
    """`value`, or a copy when it is a view of a larger storage: pickling a tensor writes the whole storage."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type == "meta":
        return value
    used = value.numel() * value.element_size()
    return value.clone() if value.untyped_storage().nbytes() > used else value
