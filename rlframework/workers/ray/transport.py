"""Values on their way through Ray's object store: stored with one copy, read with none.

Ray keeps what is pickled with protocol 5 as a head and buffers, and gives a reader the buffers where they lie, in
memory that all processes of the machine share. A tensor made there would be everybody's: writing into it changes the
stored object. So a reader, worker or driver, looks at that memory through a private mapping (`private_memory`): what it
reads are the stored bytes themselves, and the system copies a page (4 KiB) at the moment in which the reader first
writes into it. Arguments and results stay what the interface says, the reader's own, and nothing is copied that is only
read.

Where memory cannot be mapped (another system than Linux, a raylet of another user) a large value is copied, as small
ones always are. The object stays in the store for as long as somebody holds a tensor of it.
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
"""Bytes of a value from which it is mapped: below, a copy takes less time than finding the memory."""

_STORES: dict[tuple[int, int], int | None] = {}
"""Open files of object stores by device and inode; None: it cannot be opened."""


def is_worth_packing(value: Any) -> bool:
    """Whether there may be tensors or arrays in `value`: a mapping, one of them, or a list of such."""
    if isinstance(value, (list, tuple)):
        return any(is_worth_packing(item) for item in value)
    return not is_small(value)


class Packed:
    """A value, pickled once, that is itself again where Ray unpickles it.

    CPU tensors and arrays, also views, are not copied until Ray stores them, and only their own elements are. They must
    not change before that. A `TypeError` where something in it cannot be pickled.
    """

    __slots__ = ("_buffers", "_head")

    def __init__(self, value: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        try:
            self._head = _pickled(value, self._buffers.append)
        except Exception as error:
            raise TypeError(
                f"what goes to worker processes must be picklable: {type(error).__name__}: {error}"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._head, self._buffers)


def call_arguments(
    method_name: str, wants_result: Any, names: Sequence[str | None], values: Sequence[Any]
) -> tuple[Any, ...]:
    """A call of a worker as arguments of its actor: one packed, for Ray takes its time with each, and what is stored
    already, which must be an argument alone.
    """
    import ray

    stored = {place: value for place, value in enumerate(values) if isinstance(value, ray.ObjectRef)}
    own = [None if place in stored else value for place, value in enumerate(values)]
    return Packed((method_name, wants_result, names, own, list(stored))), *stored.values()


def _pickled(value: Any, keep: Callable[[pickle.PickleBuffer], Any]) -> bytes:
    import io

    file = io.BytesIO()
    _pickler()(file, protocol=5, buffer_callback=keep).dump(value)
    return file.getvalue()


@cache
def _pickler() -> Any:
    """Ray's own, which also takes functions and classes of the driver's program, with tensors as buffers."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Tensors go as `rlframework.batch.tensor_parcel` has it."""

        def reducer_override(self, value: Any) -> Any:
            """See `pickle.Pickler.reducer_override`."""
            torch = sys.modules.get("torch")
            if torch is None or type(value) is not torch.Tensor or value.requires_grad:
                return super().reducer_override(value)  # type: ignore[no-untyped-call]
            from rlframework.batch.tensor_parcel import Parcel, parcel

            sent = parcel(value)
            return sent.__reduce_ex__(5) if isinstance(sent, Parcel) else NotImplemented

    return Pickler


def _unpacked(head: bytes, buffers: Sequence[Any]) -> Any:
    views = [memoryview(buffer) for buffer in buffers]
    mapped = _mapped(views) if sum(view.nbytes for view in views) >= MAPPED_FROM else None
    return pickle.loads(head, buffers=mapped or [bytearray(view) for view in views])  # noqa: S301 - from our driver


@dataclass(frozen=True)
class _Region:
    """A line of `/proc/self/maps`."""

    start: int
    end: int
    offset: int
    store: tuple[int, int]


def _mapped(views: Sequence[memoryview]) -> list[memoryview] | None:
    """The same bytes in private memory, or None where that cannot be."""
    places = [_address(view) for view in views]
    start = min(place for place, view in zip(places, views, strict=True) if view.nbytes)
    size = max(place + view.nbytes for place, view in zip(places, views, strict=True)) - start
    region = _region(start, size)
    file = None if region is None else _store(region.store)
    if region is None or file is None:
        return None
    whole = private_memory.window(file, region.offset + start - region.start, size, keep=views)
    if whole is None:
        return None
    return [
        whole[place - start : place - start + view.nbytes] if view.nbytes else memoryview(bytearray())
        for place, view in zip(places, views, strict=True)
    ]


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.nbytes else 0


def _region(start: int, size: int) -> _Region | None:
    """The shared mapping of this process that has all of the `size` bytes at `start`."""
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
    """The file of an object store: it has no name any more, but the raylet of this machine has it open."""
    if store not in _STORES:
        found = (_open_of(process, store) for process in _raylets())
        _STORES[store] = next((file for file in found if file is not None), None)
    return _STORES[store]


def _raylets() -> Iterator[int]:
    """The raylet that started this process, in a worker; then all that there are."""
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
