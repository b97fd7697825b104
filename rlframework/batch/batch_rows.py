"""Operations of `BatchedDataDict` on one value: count, slice, select, join and pad its rows.

A value is a tensor with the batch on dimension 0, a list with one element per row, or a `PackedTensor`. Rows of lists
and of PackedTensors are passed by reference, not copied.
"""

from __future__ import annotations

import copy
import math
import operator
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, TypeGuard

import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.packed_tensor import PackedTensor, sharing_media

Rows = torch.Tensor | list[Any] | PackedTensor
"""The type of a batch's values."""

_STRIDED = torch.strided


def as_rows(key: Any, value: Any) -> Rows:
    """Return `value` if it has rows; otherwise raise `BatchTypeError` naming `key`."""
    if isinstance(value, (list, PackedTensor)):
        return value
    if not isinstance(value, torch.Tensor):
        raise BatchTypeError(
            f"the value of {key!r} is a {type(value).__name__}; a batch holds tensors with the batch on dimension 0, "
            "lists with one element per row, and PackedTensors: convert it, or keep it outside the batch"
        )
    if value.ndim == 0:
        raise BatchTypeError(f"the value of {key!r} is a 0-dimensional tensor; dimension 0 must be the batch")
    if value.layout is not _STRIDED:
        raise BatchTypeError(
            f"the value of {key!r} is a tensor of layout {value.layout}; convert it with `.to_dense()`"
        )
    return value


def count_rows(data: Mapping[Any, Any], what: str = "the batch") -> int:
    """Return the number of rows of every value, 0 without keys; raise `BatchError` with all counts if they differ."""
    common = -1
    for key, value in data.items():  # a fast path for plain tensors: every slice of a batch counts its rows
        if isinstance(value, torch.Tensor) and (shape := value.shape) and value.layout is _STRIDED:
            count = shape[0]
        else:
            count = len(as_rows(key, value))
        if count != common:
            if common >= 0:
                counts = {name: len(as_rows(name, other)) for name, other in data.items()}
                raise BatchError(f"all values of {what} must have the same number of rows (dimension 0), got {counts}")
            common = count
    return max(common, 0)


def read_count(value: Any, name: str, least: float = -math.inf, most: float = math.inf) -> int:
    """Return `value` as an int in `least..most`; raise `BatchTypeError` or `BatchError` naming it otherwise."""
    try:
        count = operator.index(value)
    except (TypeError, RuntimeError):
        count = None
    if count is None or isinstance(value, bool):
        raise BatchTypeError(f"{name} must be an integer, got {reprlib.repr(value)} ({type(value).__name__})")
    if not least <= count <= most:
        bound = f"at least {least}" if count < least else f"at most {most}"
        raise BatchError(f"{name} must be {bound}, got {count}")
    return count


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def as_integers(what: str, given: Any) -> torch.Tensor:
    """Return a sequence or tensor of integers or bools as an int64 or bool CPU tensor; else raise `BatchError`."""
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BatchError(f"{what} takes integers, got {reprlib.repr(given)}: {error}") from error
    if not tensor.numel() and not isinstance(given, torch.Tensor):
        return tensor.to(torch.int64)
    if tensor.is_floating_point() or tensor.is_complex():
        raise BatchError(f"{what} takes integers, got {tensor.dtype} of shape {list(tensor.shape)}")
    return tensor.cpu() if tensor.dtype == torch.bool else tensor.to("cpu", torch.int64)


def as_row_indices(indices: Any, size: int) -> torch.Tensor:
    """Return `[n]` int64 in 0..size-1, from integers (negative ones count from the end) or a mask of `size` bools."""
    given = as_integers("select_indices", indices)
    if given.dtype == torch.bool and given.shape == (size,):
        return given.nonzero().squeeze(1)
    if given.ndim != 1 or given.dtype == torch.bool:
        raise BatchError(
            f"select_indices takes a list of integers or a mask of {size} bools, got {given.dtype} of shape "
            f"{list(given.shape)}"
        )
    wrong = given[(given < -size) | (given >= size)]
    if len(wrong):
        raise BatchError(f"row {int(wrong[0])} is not in the batch of {size} rows: indices are {-size}..{size - 1}")
    return torch.where(given < 0, given + size, given)


def as_device(device: Any) -> torch.device:
    """Return `torch.device(device)`; raise `BatchError` if it names no device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BatchError(f"{reprlib.repr(device)} is not a device: {error}") from error


@contextmanager
def device_errors(key: Any, device: torch.device | None) -> Iterator[None]:
    """Context manager: turn a failed move to `device` (missing here, or from the meta device) into a `BatchError`."""
    try:
        yield
    except (torch.OutOfMemoryError, BatchError):
        raise
    except (RuntimeError, AssertionError) as error:
        raise BatchError(f"{key!r} cannot be moved to {device}: {error}") from error


def pick_rows(value: Rows, indices: torch.Tensor) -> Rows:
    """Return the rows at `indices` (int64 on the CPU, none negative) in that order; a tensor is copied."""
    if isinstance(value, torch.Tensor):
        return value.index_select(0, indices.to(value.device))
    if isinstance(value, PackedTensor):
        return value.slice(indices)
    return [value[index] for index in indices.tolist()]


def join_blocks(value: Rows, blocks: Sequence[tuple[int, int]]) -> Rows:
    """Return the rows of the `[start, end)` blocks, concatenated; the bytes of a tensor are copied once."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value[start:end] for start, end in blocks]) if blocks else value[:0].clone()
    if isinstance(value, PackedTensor):
        return PackedTensor.concat([value[:0], *(value[start:end] for start, end in blocks)])
    return [item for start, end in blocks for item in value[start:end]]


def repeat_rows(key: Any, value: Rows, repeats: int, *, share_media: bool) -> Rows:
    """Return each row `repeats` times; list elements are deep copies, except for their media with `share_media`."""
    if isinstance(value, torch.Tensor):
        return value.repeat_interleave(repeats, dim=0)
    if isinstance(value, PackedTensor):
        if not share_media:
            raise BatchTypeError(
                f"repeat_interleave would copy the media of {key!r} for each repeat; if nothing writes to them, pass "
                "share_immutable_media=True so that all repeats share them"
            )
        return value.slice(torch.arange(len(value)).repeat_interleave(repeats))
    if not share_media:
        return [copy.deepcopy(item) for item in value for _ in range(repeats)]
    with sharing_media():
        return [copy.deepcopy(item) for item in value for _ in range(repeats)]


def collect_values(
    key: Any, batches: Sequence[Mapping[Any, Any]], sizes: Sequence[int], *, fill_packed: bool
) -> list[Any]:
    """Return the values of `key` in the batches, which have `sizes` rows; only a batch without rows may lack it.

    With `fill_packed`, a missing PackedTensor counts as rows without media.
    """
    known = [batch[key] for batch in batches if key in batch]
    missing = [position for position, batch in enumerate(batches) if sizes[position] and key not in batch]
    if not missing:
        return known
    if fill_packed and all(isinstance(value, PackedTensor) for value in known):
        pairs = zip(batches, sizes, strict=True)
        return [b[key] if key in b else PackedTensor([None] * size, known[0].dim_to_pack) for b, size in pairs]
    raise BatchKeyError(
        f"key {key!r} is missing from batch {', '.join(map(str, missing))} of {len(batches)}; all batches with rows "
        "must have the same keys: add it there, or delete it elsewhere"
    )


def concatenate(key: Any, values: Sequence[Any], pad_value: float) -> Rows:
    """Return all rows of `values`, in order.

    Lists, PackedTensors and 1-D tensors are joined. Tensors of more dimensions are padded on the right of dimension 1
    to the longest; they must have the same device and the same sizes from dimension 2 on. A 1-D tensor among them
    counts as rows of one element. Values without rows do not widen the others.
    """
    rows = [as_rows(key, value) for value in values]
    rows = [value for value in rows if len(value)] or rows
    tensors = [value for value in rows if isinstance(value, torch.Tensor)]
    packed = [value for value in rows if isinstance(value, PackedTensor)]
    lists = [value for value in rows if isinstance(value, list)]
    if len(rows) not in (len(tensors), len(packed), len(lists)):
        kinds = sorted({type(value).__name__ for value in rows})
        raise BatchTypeError(
            f"the values of {key!r} are of different kinds, {', '.join(kinds)}; use the same kind in all batches"
        )
    if packed:
        return PackedTensor.concat(packed)
    if not tensors:
        return [item for value in lists for item in value]
    if any(tensor.ndim > 1 for tensor in tensors):
        tensors = [tensor.unsqueeze(1) if tensor.ndim == 1 else tensor for tensor in tensors]
    _check_joinable(key, tensors)
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(tensors)
    return _pad_and_join(key, tensors, pad_value)


def _check_joinable(key: Any, tensors: Sequence[torch.Tensor]) -> None:
    if len({(tensor.ndim, tensor.shape[2:]) for tensor in tensors}) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise BatchError(
            f"the values of {key!r} cannot be joined: they have shapes {shapes}, but only dimensions 0 (the batch) and "
            "1 (the sequence) may differ"
        )
    if len({tensor.device for tensor in tensors}) > 1:
        devices = sorted({str(tensor.device) for tensor in tensors})
        raise BatchError(f"the values of {key!r} are on several devices {devices}; move them to one with `.to(device)`")


def _pad_and_join(key: Any, tensors: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    width = max(tensor.shape[1] for tensor in tensors)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    shape = (sum(len(tensor) for tensor in tensors), width, *tensors[0].shape[2:])
    joined = torch.empty(shape, dtype=dtype, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        end = start + len(tensor)
        joined[start:end, : tensor.shape[1]] = tensor
        try:
            joined[start:end, tensor.shape[1] :] = pad_value
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise BatchError(f"{key!r} ({dtype}) cannot be padded with {reprlib.repr(pad_value)}: {error}") from error
        start = end
    return joined


def is_integral(value: Any) -> TypeGuard[Tensor]:
    """Whether `value` is a tensor of integers; bools do not count."""
    return isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    )


def describe(value: Any) -> str:
    """Describe a value for messages: dtype and shape of a tensor, the type of anything else."""
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def read_lengths(
    value: Any, width: int | None = None, name: str = "input_lengths", tokens: str = "input_ids"
) -> list[int]:
    """Return a tensor of lengths `[B]` as a list; raise `BatchError` unless they are integers in 0..`width`.

    `width` is the number of columns of `tokens` (None: unlimited).
    """
    if not is_integral(value) or value.ndim != 1 or value.device.type == "meta":
        raise BatchTypeError(f"{name} must be a 1-D tensor of integers, got {describe(value)}")
    lengths: list[int] = value.tolist()
    if lengths and (min(lengths) < 0 or (width is not None and max(lengths) > width)):
        row = next(row for row, length in enumerate(lengths) if length < 0 or (width is not None and length > width))
        allowed = "0 or more" if width is None else f"0..{width}, the columns of {tokens}"
        raise BatchError(f"{name} of row {row} is {lengths[row]}; allowed is {allowed}")
    return lengths


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, without waiting for a GPU: the copy is from pinned memory, which torch keeps."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()  # an expanded tensor cannot be pinned
    return tensor.to(device, non_blocking=True)


def copy_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `tensors` in CPU memory, by a single copy for each dtype: so often a GPU is waited for."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    copied: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        joined = torch.cat([tensors[number].flatten() for number in same]).cpu()
        parts = joined.split([tensors[number].numel() for number in same])
        copied |= {number: part.view(tensors[number].shape) for number, part in zip(same, parts, strict=True)}
    return [copied[number] for number in range(len(tensors))]
