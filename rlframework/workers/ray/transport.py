"""Transport of values through Ray's object store: one copy to store them, none to read them.

Ray stores a value pickled with protocol 5 as a header and buffers, and passes readers the buffers in place, in memory
shared by all processes of the machine. A tensor on top of that memory would be shared too: writing to it would change
the stored object. A reader (worker or driver) therefore accesses the memory through a private mapping
(`private_memory`): it reads the stored bytes directly, and the system copies a page (4 KiB) when the reader first
writes to it. Readers thus own their arguments and results, as the interface promises, and nothing is copied just to be
read.

If the memory cannot be mapped (not Linux, or a raylet of another user), a large value is copied, as small values always
are. An object stays in the store as long as a tensor of it is alive.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlframework.workers.dispatch import is_small
from rlframework.workers.ray import private_memory

MAPPED_FROM = 1 << 20
"""Minimum size in bytes of a value to be mapped; copying a smaller one is faster than looking up its memory."""

_STORES: dict[tuple[int, int], int | None] = {}
"""File descriptors of object stores by device and inode; None for a store that cannot be opened."""


def is_worth_packing(value: Any) -> bool:
    """Whether `value` may contain tensors or arrays: True for anything but scalars and lists of them."""
    if isinstance(value, (list, tuple)):
        return any(is_worth_packing(item) for item in value)
    return not is_small(value)


class Packed:
    """A value that is pickled once; Ray unpickles this as the value itself.

    CPU tensors and arrays, including views, are copied only when Ray stores them, and only their own elements; they
    must not change before. Raises `TypeError` if something in the value cannot be pickled.
    """

    __slots__ = ("_buffers", "_head")

    def __init__(self, value: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        try:
            self._head = _pickled(value, self._buffers.append)
        except Exception as error:
            raise TypeError(
                f"values sent to worker processes must be picklable: {type(error).__name__}: {error}"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._head, self._buffers)


def call_arguments(
    method_name: str, wants_result: Any, names: Sequence[str | None], values: Sequence[Any]
) -> tuple[Any, ...]:
    """The arguments with which to call a worker's actor: one `Packed` call, then the values already in Ray's store.

    Arguments are packed together because each argument costs Ray time; an `ObjectRef` must be a separate argument.
    """
    import ray

    stored = {position: value for position, value in enumerate(values) if isinstance(value, ray.ObjectRef)}
    unstored = [None if position in stored else value for position, value in enumerate(values)]
    return Packed((method_name, wants_result, names, unstored, list(stored))), *stored.values()


def _pickled(value: Any, keep: Callable[[pickle.PickleBuffer], Any]) -> bytes:
    import io

    file = io.BytesIO()
    _pickler()(file, protocol=5, buffer_callback=keep).dump(value)
    return file.getvalue()


@cache
def _pickler() -> Any:
    """Ray's pickler, which supports functions and classes of the driver's program, extended with tensors as buffers."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Pickles tensors as `rlframework.batch.tensor_pickling` does."""

        def reducer_override(self, value: Any) -> Any:
            """See `pickle.Pickler.reducer_override`."""
            torch = sys.modules.get("torch")
            if torch is None or type(value) is not torch.Tensor or value.requires_grad:
                return super().reducer_override(value)  # type: ignore[no-untyped-call]
            from rlframework.batch.tensor_pickling import PickledTensors, picklable

            sent = picklable(value)
            return sent.__reduce_ex__(5) if isinstance(sent, PickledTensors) else NotImplemented

    return Pickler


def _unpacked(head: bytes, buffers: Sequence[Any]) -> Any:
    views = [memoryview(buffer) for buffer in buffers]
    mapped = _mapped(views) if sum(view.nbytes for view in views) >= MAPPED_FROM else None
    return pickle.loads(head, buffers=mapped or [bytearray(view) for view in views])  # noqa: S301 - from our driver


@dataclass(frozen=True)
class _Region:
    """A memory region: a line of `/proc/self/maps`."""

    start: int
    end: int
    offset: int
    store: tuple[int, int]


def _mapped(views: Sequence[memoryview]) -> list[memoryview] | None:
    """The same bytes in private memory, or None if they cannot be mapped."""
    addresses = [_address(view) for view in views]
    start = min(address for address, view in zip(addresses, views, strict=True) if view.nbytes)
    size = max(address + view.nbytes for address, view in zip(addresses, views, strict=True)) - start
    region = _region(start, size)
    file = None if region is None else _store(region.store)
    if region is None or file is None:
        return None
    whole = private_memory.window(file, region.offset + start - region.start, size, owner=views)
    if whole is None:
        return None
    return [
        whole[address - start : address - start + view.nbytes] if view.nbytes else memoryview(bytearray())
        for address, view in zip(addresses, views, strict=True)
    ]


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.nbytes else 0


def _region(start: int, size: int) -> _Region | None:
    """The shared mapping of this process that contains all `size` bytes at `start`."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            bounds, _, rest = line.partition(" ")
            first, _, last = bounds.partition("-")
            if int(last, 16) <= start:
                continue
            permissions, offset, device, inode = rest.split(None, 4)[:4]
            major, _, minor = device.partition(":")
            found = _Region(
                int(first, 16),
                int(last, 16),
                int(offset, 16),
                (os.makedev(int(major, 16), int(minor, 16)), int(inode)),
            )
            return found if found.start <= start and start + size <= found.end and permissions[3] == "s" else None
    return None


def _store(store: tuple[int, int]) -> int | None:
    """A file descriptor of an object store, whose file is unlinked but still open in this machine's raylet."""
    if store not in _STORES:
        found = (_open_of(process, store) for process in _raylets())
        _STORES[store] = next((file for file in found if file is not None), None)
    return _STORES[store]


def _raylets() -> Iterator[int]:
    """Process ids of raylets: in a worker, first the one that started it; then all on this machine."""
    own = os.environ.get("RAY_RAYLET_PID", "")
    if own.isdigit():
        yield int(own)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "comm").read_text().strip() == "raylet":
                yield int(folder.name)


def _open_of(process: int, store: tuple[int, int]) -> int | None:
    folder = f"/proc/{process}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                found = os.stat(f"{folder}/{name}")
                if (found.st_dev, found.st_ino) == store:
                    return os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return None
