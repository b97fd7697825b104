"""How the tensors of a batch go to another process: each byte is copied as few times as the way allows.

| way                                              | copies while sending    | copies while receiving                  |
|--------------------------------------------------|-------------------------|-----------------------------------------|
| protocol 5 with buffers apart from it, as in Ray | none                    | one if what arrives is read-only        |
| protocol 5 in one piece                          | one, into the pickle    | one, out of it                          |
| protocol 4 (the default up to Python 3.13)       | two                     | two: what is in the pickle is read-only |
| protocols 0 to 2, and `torch.save`               | as torch does it        | as torch does it                        |
| `multiprocessing` (its queues, pipes and pools)  | one, into shared memory | none                                    |

What arrives is the receiver's own, writable and contiguous, has the same values, shape and dtype, and never more than
them (a view does not take its storage along). It has no gradient and asks for none. Not here: tensors on devices,
subclasses and sparse ones, which go torch's own way.
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
"""Bytes from which `multiprocessing` gets shared memory, which costs a file descriptor; fewer go through its pipe."""

_ALIGNMENT = 64


def parcel(value: Tensor) -> Any:
    """What to put into a pickle's state in place of `value`; where that is read, there is a tensor again."""
    return Parcel([value], single=True) if _can_travel(value) else _own_elements(value)


def parcel_rows(rows: Sequence[Tensor | None]) -> Any:
    """The same for a list of tensors, or None, that belong together: one piece of shared memory for all of them."""
    if all(row is None or _can_travel(row) for row in rows):
        return Parcel(rows)
    return [None if row is None else _own_elements(row) for row in rows]


class Parcel:
    """CPU tensors on their way: unpickled, it is the list of them, or with `single` the only one."""

    __slots__ = ("single", "tensors")

    def __init__(self, tensors: Sequence[Tensor | None], *, single: bool = False) -> None:
        self.tensors = tensors
        self.single = single

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpack, (self.single, [None if row is None else _packed(row, protocol) for row in self.tensors])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _as_they_are(self.single, [None if row is None else _own_copy(row, memo) for row in self.tensors])


def _can_travel(value: Tensor) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_nested
    )


def _own_elements(value: Tensor) -> Tensor:
    """`value` without gradient, and as a copy when it is a view of a larger storage: torch pickles whole storages."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.device.type == "meta" or value.is_nested:
        return value
    used = value.numel() * value.element_size()
    return value.detach().clone() if value.untyped_storage().nbytes() > used else value.detach()


def _own_copy(value: Tensor, memo: dict[int, Any]) -> Tensor:
    """`copy.deepcopy` of `value`, but of its elements only."""
    if value.requires_grad:
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        memo[id(value)] = value.clone()
    found: Tensor = memo[id(value)]
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements in order as `[bytes]` uint8: a view where `tensor` is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def _packed(tensor: Tensor, protocol: int) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    raw = bytes_of(tensor)
    array: Any = raw.numpy()
    data: Any = b""
    if protocol < 3:  # has no bytes; and `torch.save` keeps tensors apart
        data = _own_elements(raw)
    elif len(raw):
        data = pickle.PickleBuffer(array) if protocol >= 5 else array.tobytes()
    return data, tensor.dtype, tuple(tensor.shape)


def _as_they_are(single: bool, tensors: list[Tensor | None]) -> Any:
    return tensors[0] if single else tensors


def _unpack(single: bool, packed: list[tuple[Any, torch.dtype, tuple[int, ...]] | None]) -> Any:
    return _as_they_are(single, [None if item is None else _unpacked(*item) for item in packed])


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
    """The bytes of a buffer that cannot be written, by torch, which copies faster than memcpy and with its threads."""
    there = np.frombuffer(data, dtype=np.uint8)
    same = (ctypes.c_ubyte * there.size).from_address(there.ctypes.data)  # torch would warn of `there`
    return torch.frombuffer(same, dtype=torch.uint8).clone()


def _reduce_for_multiprocessing(sent: Parcel) -> tuple[Any, ...]:
    """One shared block for all tensors, written once; where there is no room for it, through the pipe."""
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
    at = iter(starts)
    where = [None if tensor is None else (next(at), tensor.dtype, tuple(tensor.shape)) for tensor in sent.tensors]
    return _take_out, (sent.single, block, where)


def _take_out(single: bool, block: Tensor, where: list[tuple[int, torch.dtype, tuple[int, ...]] | None]) -> Any:
    return _as_they_are(single, [None if item is None else _elements(block, *item) for item in where])


def _elements(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape) * dtype.itemsize
    return block[start : start + count].view(dtype).reshape(shape)


ForkingPickler.register(Parcel, _reduce_for_multiprocessing)
