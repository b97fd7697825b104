"""Private copy-on-write views of a shared-memory file that other processes fill.

A new mapping costs a page fault for every page on first access, which takes as long as a copy. So the whole file is
mapped once, its pages stay mapped, and readers of a range get a window into that mapping. Pages that were written to
are private copies of this process: they are discarded when the last view of the window is gone, because others may then
refill that range of the file. Windows never share a page: a range that overlaps an open window gets its own mapping.
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
_LOCK = threading.RLock()  # a window may be closed while another is being opened in the same thread


class _Mapping:
    """A private mapping of a whole file."""

    def __init__(self, file: int) -> None:
        self.memory = _map(file, os.fstat(file).st_size, 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.open: dict[int, tuple[int, int]] = {}
        """The page-aligned byte range `[start, end)` of each open window."""

    def is_free(self, start: int, end: int) -> bool:
        """Whether no window overlaps this range."""
        return all(end <= first or last <= start for first, last in list(self.open.values()))

    def discard_writes(self, start: int, end: int) -> None:
        """Discard the pages of this range that were written to."""
        first, last = _written(self.address + start, end - start)
        if first < last:
            self.memory.madvise(mmap.MADV_DONTNEED, start + first, last - first)


def window(file: int, offset: int, size: int, owner: Any) -> memoryview | None:
    """A writable private view of `size` bytes of the open `file` from `offset`; None if it cannot be mapped.

    `owner` is kept alive until the last view of the window is gone, and must prevent changes to this range meanwhile.
    """
    start, end = offset // _PAGE * _PAGE, -(-(offset + size) // _PAGE) * _PAGE
    try:
        with _LOCK:
            mapping = _mapping(file)
            if mapping is None or not mapping.is_free(start, end):
                own = _map(file, offset + size - start, start)
                view = (ctypes.c_ubyte * size).from_buffer(own, offset - start)
                weakref.finalize(view, _drop_owner, owner).atexit = False
            else:
                view = (ctypes.c_ubyte * size).from_buffer(mapping.memory, offset)
                mapping.open[id(view)] = (start, end)
                weakref.finalize(view, _close, mapping, id(view), owner).atexit = False
    except (OSError, ValueError):  # too many mappings, or no memory can be committed for possible writes
        return None
    return memoryview(view).cast("B")


def _mapping(file: int) -> _Mapping | None:
    if file not in _MAPPINGS:
        _MAPPINGS[file] = None
        with suppress(OSError, ValueError):
            _MAPPINGS[file] = _Mapping(file)
    return _MAPPINGS[file]


def _map(file: int, size: int, offset: int) -> mmap.mmap:
    private, writable = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(file, size, flags=private, prot=writable, offset=offset)


def _close(mapping: _Mapping, key: int, owner: Any) -> None:
    with _LOCK:
        mapping.discard_writes(*mapping.open[key])
        del mapping.open[key]


def _drop_owner(owner: Any) -> None:
    """Do nothing but release the reference to `owner`; the mapping is freed with its window."""


def _written(address: int, size: int) -> tuple[int, int]:
    """The range `[first, end)` of private bytes at `address`, as offsets in whole pages; everything if unknown."""
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
    allocated = (entries >> np.uint64(_PRESENT) | entries >> np.uint64(_SWAPPED)) & np.uint64(1)
    private = np.flatnonzero(allocated & ~(entries >> np.uint64(_FILE_PAGE)) & np.uint64(1))
    return (int(private[0]) * _PAGE, (int(private[-1]) + 1) * _PAGE) if len(private) else (0, 0)
