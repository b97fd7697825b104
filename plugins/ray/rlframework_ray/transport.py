"""Transport of values through Ray's object store: one copy to store them, none to read large ones.

Ray stores a value pickled with protocol 5 as a header and buffers, and passes readers the buffers in place, in memory
shared by all processes of the machine. A tensor on top of that memory would be shared too: writing to it would change
the stored object. A reader (worker or driver) therefore copies a buffer, or maps a large one privately: it reads the
stored bytes directly, and the system copies a page (4 KiB) when the reader first writes to it. Readers thus own their
arguments and results, as the interface promises.

A buffer that cannot be mapped (not Linux, or a raylet of another user) is copied. An object stays in the store as long
as a tensor mapped onto it is alive. A new mapping costs page faults, 8 ms for 64 MiB, where a copy costs 38 ms.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from ray import ObjectRef, cloudpickle

MAPPED_FROM = 1 << 24
"""Minimum size in bytes of a buffer to be mapped; copying a smaller one takes no longer than reading new mappings."""
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE: commit no memory for writes that never happen."""
_SENT_AS_THEY_ARE = (ObjectRef, type(None), bool, int, float, str)
_EMPTY = ()


class Packed:
    """A value that is pickled once; Ray unpickles this as the value itself.

    CPU tensors and arrays, including views, are copied only when Ray stores them, and only their own elements; they
    must not change before. Raises `TypeError` if something in the value cannot be pickled.
    """

    __slots__ = ("_buffers", "_head")

    def __init__(self, value: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        try:
            _Pickler(file, protocol=5, buffer_callback=self._buffers.append).dump(value)  # type: ignore[no-untyped-call]
        except Exception as error:
            from rlframework.workers.failures import unpicklable

            raise unpicklable(value, error) from error
        self._head = file.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._head, self._buffers)


def packed_call(method: Any, /, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """A function that calls `method`, a remote method, with packed arguments; references to stored values stay."""
    named = {name: _packed(value) for name, value in kwargs.items()}
    return partial(method.remote, *map(_packed, args), **named)


def _packed(value: Any) -> Any:
    return value if isinstance(value, _SENT_AS_THEY_ARE) or value is _EMPTY else Packed(value)


class _Pickler(cloudpickle.Pickler):
    """Ray's pickler, which supports functions and classes of the driver's program, extended with tensors as buffers."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.requires_grad:
            return super().reducer_override(value)  # type: ignore[no-untyped-call]
        from rlframework.batch.packed_tensor import PickledTensor, picklable

        sent = picklable(value)
        return sent.__reduce_ex__(5) if isinstance(sent, PickledTensor) else NotImplemented


def _unpacked(head: bytes, buffers: Sequence[Any]) -> Any:
    return pickle.loads(head, buffers=[_private(memoryview(buffer)) for buffer in buffers])  # noqa: S301 - our driver's


class _PrivateMemory(mmap.mmap):
    """A private mapping of a part of the store. Refers to the stored object, whose memory could be reused otherwise."""

    stored: memoryview


def _private(view: memoryview) -> bytearray | memoryview:
    """Writable private memory with the bytes of `view`."""
    place = _place(view) if view.nbytes >= MAPPED_FROM else None
    if place is None:
        return bytearray(view)
    file, offset = place
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        memory = _PrivateMemory(file, skipped + view.nbytes, flags=flags, prot=access, offset=offset - skipped)
    except (OSError, ValueError):  # too many mappings
        return bytearray(view)
    memory.stored = view
    return memoryview(memory)[skipped:]


def _place(view: memoryview) -> tuple[int, int] | None:
    """The file of the object store that `view` is a part of, and its offset there; None if that is unknown."""
    start = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            bounds, permissions, offset, device, inode = line.split(None, 5)[:5]
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            if first <= start < last:
                major, minor = (int(number, 16) for number in device.split(":"))
                is_store = permissions.endswith("s") and start + view.nbytes <= last
                file = _store(os.makedev(major, minor), int(inode)) if is_store else None
                return None if file is None else (file, int(offset, 16) + start - first)
    return None


@cache
def _store(device: int, inode: int) -> int | None:
    """A descriptor of the object store's file, which is unlinked but still open in its raylet."""
    own = os.environ.get("RAY_RAYLET_PID")  # set in workers
    raylets = [own] if own else [each.pid for each in psutil.process_iter(["name"]) if each.info["name"] == "raylet"]
    for raylet in raylets:
        for path in Path(f"/proc/{raylet}/fd").glob("*"):
            with suppress(OSError):
                found = path.stat()
                if (found.st_dev, found.st_ino) == (device, inode):
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
