"""Pickling of the tensors of a batch for another process, with as few copies as the transport allows.

| transport                                       | copies while sending    | copies while receiving               |
|-------------------------------------------------|-------------------------|--------------------------------------|
| protocol 5 with out-of-band buffers, as in Ray  | none                    | one if the buffers are read-only     |
| protocol 5 with in-band buffers                 | one, into the pickle    | one, out of it                       |
| protocol 4 (the default up to Python 3.13)      | two                     | two: bytes in a pickle are read-only |
| protocols 0 to 2, and `torch.save`              | as torch does it        | as torch does it                     |
| `multiprocessing` (its queues, pipes and pools) | one, into shared memory | none                                 |

The received tensor belongs to the receiver. It is writable and contiguous and has the same values, shape and dtype; a
view is sent without the rest of its storage. It has no gradient and does not require one. Does not cover tensors on
devices, tensor subclasses and sparse tensors, which torch pickles in its own way.
"""

from __future__ import annotations

import copy
import ctypes
import math
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHARED_FROM = 1 << 18
"""The least bytes for which `multiprocessing` uses shared memory, which costs a file descriptor, and not its pipe."""

_ALIGNMENT = 64


def picklable(value: Tensor) -> Any:
    """Return an object to put into a pickle's state instead of `value`; it is unpickled as a tensor."""
    return PickledTensors([value], single=True) if _is_supported(value) else _own_elements(value)


def picklable_rows(rows: Sequence[Tensor | None]) -> Any:
    """As `picklable`, for a list of tensors or None that share one block of shared memory."""
    if all(row is None or _is_supported(row) for row in rows):
        return PickledTensors(rows)
    return [None if row is None else _own_elements(row) for row in rows]


class PickledTensors:
    """CPU tensors in the state of a pickle; unpickled as the list of them, or with `single` as the only one."""

    __slots__ = ("single", "tensors")

    def __init__(self, tensors: Sequence[Tensor | None], *, single: bool = False) -> None:
        self.tensors = tensors
        self.single = single

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpack, (self.single, [None if row is None else _packed(row, protocol) for row in self.tensors])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _unwrap(self.single, [None if row is None else _own_copy(row, memo) for row in self.tensors])


def _is_supported(value: Tensor) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_nested
    )


def _own_elements(value: Tensor) -> Tensor:
    """Detach `value`, and copy it if it is a view of a larger storage, as torch pickles whole storages."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.device.type == "meta" or value.is_nested:
        return value
    used = value.numel() * value.element_size()
    return value.detach().clone() if value.untyped_storage().nbytes() > used else value.detach()


def _own_copy(value: Tensor, memo: dict[int, Any]) -> Tensor:
    """Like `copy.deepcopy` of `value`, but copy only its elements, not its storage."""
    if value.requires_grad:
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        memo[id(value)] = value.clone()
    found: Tensor = memo[id(value)]
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements, in order, as `[bytes]` uint8; a view if `tensor` is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a tensor of one element may have any stride


def _packed(tensor: Tensor, protocol: int) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    raw = bytes_of(tensor)
    array: Any = raw.numpy()
    data: Any = b""
    if protocol < 3:  # has no type for bytes; `torch.save`, which uses protocol 2, stores tensors separately
        data = _own_elements(raw)
    elif len(raw):
        data = pickle.PickleBuffer(array) if protocol >= 5 else array.tobytes()
    return data, tensor.dtype, tuple(tensor.shape)


def _unwrap(single: bool, tensors: list[Tensor | None]) -> Any:
    return tensors[0] if single else tensors


def _unpack(single: bool, packed: list[tuple[Any, torch.dtype, tuple[int, ...]] | None]) -> Any:
    return _unwrap(single, [None if item is None else _unpacked(*item) for item in packed])


def _unpacked(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    if isinstance(data, Tensor):
        raw = data
    else:
        raw = _copied(data) if memoryview(data).readonly else torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)


def _copied(data: Any) -> Tensor:
    """Copy a read-only buffer with torch, whose multi-threaded copy is faster than memcpy."""
    source = np.frombuffer(data, dtype=np.uint8)
    same = (ctypes.c_ubyte * source.size).from_address(source.ctypes.data)  # torch warns about read-only arrays
    return torch.frombuffer(same, dtype=torch.uint8).clone()


def _reduce_for_multiprocessing(sent: PickledTensors) -> tuple[Any, ...]:
    """Copy all tensors once, into one shared block; without shared memory, send them through the pipe."""
    present = [tensor for tensor in sent.tensors if tensor is not None]
    starts, total = [], 0
    for tensor in present:
        starts.append(total)
        total += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    if total < SHARED_FROM:
        return sent.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    try:
        storage = torch.UntypedStorage._new_shared(total)
    except RuntimeError:  # no shared memory or file descriptors left
        return sent.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    block = torch.empty(0, dtype=torch.uint8).set_(storage)
    for tensor, start in zip(present, starts, strict=True):
        _elements(block, start, tensor.dtype, tuple(tensor.shape)).copy_(tensor.detach())
    offsets = iter(starts)
    slots = [None if tensor is None else (next(offsets), tensor.dtype, tuple(tensor.shape)) for tensor in sent.tensors]
    return _from_block, (sent.single, block, slots)


def _from_block(single: bool, block: Tensor, slots: list[tuple[int, torch.dtype, tuple[int, ...]] | None]) -> Any:
    return _unwrap(single, [None if slot is None else _elements(block, *slot) for slot in slots])


def _elements(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    return block[start : start + count].view(dtype).reshape(shape)


ForkingPickler.register(PickledTensors, _reduce_for_multiprocessing)
