"""Private views of a file in memory that others fill: read where it is, copied page by page where it is written to.

A mapping costs a fault for each page that is first touched, as much time as a copy. So there is one mapping for the
whole file, whose pages stay, and who reads a part of it gets a window. Pages that were written to are copies, this
process's own: they are thrown away when the last view of the window goes, because others may fill that part of the file
anew afterwards. Windows never share a page: a part that is being looked at already gets a mapping of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

_PAGE = mmap.ALLOCATIONGRANULARITY
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_FILE_PAGE, _SWAPPED, _PRESENT = 61, 62, 63
"""Bits of an entry of `/proc/self/pagemap`."""

_MAPPINGS: dict[int, _Mapping | None] = {}
_LOCK = threading.RLock()  # a window may end in the middle of the beginning of another, in the same thread


class _Mapping:
    """All of a file, privately."""

    def __init__(self, file: int) -> None:
        self.memory = _map(file, os.fstat(file).st_size, 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.open: dict[int, tuple[int, int]] = {}
        """Windows: first byte and the one after the last, in whole pages."""

    def is_free(self, start: int, end: int) -> bool:
        """Whether no window has a page of this part."""
        return all(end <= first or last <= start for first, last in list(self.open.values()))

    def forget(self, start: int, end: int) -> None:
        """Throw away what was written to in this part."""
        first, last = _written(self.address + start, end - start)
        if first < last:
            self.memory.madvise(mmap.MADV_DONTNEED, start + first, last - first)


def window(file: int, offset: int, size: int, keep: Any) -> memoryview | None:
    """`size` bytes of the open `file` from `offset` on, writable and private; None where there is no memory for it.

    The file must not change there for as long as `keep` lives, which is until the last view of the window is gone.
    """
    start, end = offset // _PAGE * _PAGE, -(-(offset + size) // _PAGE) * _PAGE
    try:
        with _LOCK:
            mapping = _mapping(file)
            if mapping is None or not mapping.is_free(start, end):
                own = _map(file, offset + size - start, start)
                part = (ctypes.c_ubyte * size).from_buffer(own, offset - start)
                weakref.finalize(part, _nothing, keep).atexit = False
            else:
                part = (ctypes.c_ubyte * size).from_buffer(mapping.memory, offset)
                mapping.open[id(part)] = (start, end)
                weakref.finalize(part, _close, mapping, id(part), keep).atexit = False
    except (OSError, ValueError):  # too many mappings, or no promise of memory for what might be written
        return None
    return memoryview(part).cast("B")


def _mapping(file: int) -> _Mapping | None:
    if file not in _MAPPINGS:
        _MAPPINGS[file] = None
        with suppress(OSError, ValueError):
            _MAPPINGS[file] = _Mapping(file)
    return _MAPPINGS[file]


def _map(file: int, size: int, offset: int) -> mmap.mmap:
    private, writable = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(file, size, flags=private, prot=writable, offset=offset)


def _close(mapping: _Mapping, key: int, keep: Any) -> None:
    with _LOCK:
        mapping.forget(*mapping.open[key])
        del mapping.open[key]


def _nothing(keep: Any) -> None:
    """What was kept may go: the mapping goes with the window."""


def _written(address: int, size: int) -> tuple[int, int]:
    """From the first to behind the last of the bytes at `address` that are no longer the file's; all where unknown."""
    import numpy as np

    pages = size // _PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            table.seek(address // _PAGE * 8)
            entries = np.frombuffer(table.read(pages * 8), dtype=np.uint64)
    except OSError:
        return 0, size
    if len(entries) != pages:
        return 0, size
    there = (entries >> np.uint64(_PRESENT) | entries >> np.uint64(_SWAPPED)) & np.uint64(1)
    own = np.flatnonzero(there & ~(entries >> np.uint64(_FILE_PAGE)) & np.uint64(1))
    return (int(own[0]) * _PAGE, (int(own[-1]) + 1) * _PAGE) if len(own) else (0, 0)
