"""Where weights lie in a buffer of bytes, and how they go in and come out with a checksum each.

The checksum is taken piece by piece, while a piece is in the processor's cache, so that it costs little beside the
copy. On a CPU it is XXH3 of 64 bits. On a GPU it is the sum of 64-bit words times factors that depend on the place.
Both find bytes that changed, moved, or came in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

ALIGNMENT = 512
"""Bytes: each weight begins at a multiple of this, which suits every dtype, vector unit and DMA engine."""

_PIECE = 256 << 10
"""Bytes that are copied and then read again for the checksum: a part of one core's own cache."""

_WORDS = 4 << 20
"""Words of a GPU's checksum at a time."""

Info = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each weight, by name, as they are sent."""


@dataclass(frozen=True)
class Slot:
    """A weight in a buffer: `size` bytes from `offset` on."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size: int

    def of(self, raw: Tensor) -> Tensor:
        """Its bytes in the buffer `raw`, uint8 of one dimension."""
        return raw[self.offset : self.offset + self.size]


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def aligned(size: int) -> int:
    """`size` bytes with what is left empty behind them."""
    return size + -size % ALIGNMENT


def group_names(sizes: Iterable[tuple[str, int]], budget: float) -> list[list[str]]:
    """Consecutive names in groups of at most `budget` bytes, as many as fit; what is larger than that goes alone."""
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes:
        if not groups or used + aligned(size) > budget:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += aligned(size)
    return groups


def place(names: Iterable[str], info: Info) -> list[Slot]:
    """A slot for each of `names`, one behind the other."""
    slots, offset = [], 0
    for name in names:
        shape, dtype = info[name]
        size = bytes_of(shape, dtype)
        slots.append(Slot(name, tuple(shape), dtype, offset, size))
        offset += aligned(size)
    return slots


def room_for(slots: Sequence[Slot]) -> int:
    """Bytes of a buffer that holds `slots`; at least one, so that there is a buffer."""
    return max(1, slots[-1].offset + aligned(slots[-1].size) if slots else 1)


def layout_checksum(info: Info) -> int:
    """Of names, shapes and dtypes in their order: two sides with the same one mean the same bytes."""
    text = "\n".join(f"{name} {tuple(shape)} {dtype}" for name, (shape, dtype) in info.items())
    return xxhash.xxh3_64_intdigest(text.encode())


@torch.no_grad()
def put(raw: Tensor, weight: Tensor, dtype: torch.dtype) -> int:
    """Write `weight` as `dtype` into the bytes `raw`; the checksum of `weight` as `dtype`.

    Of the weight itself, where nothing has to be rounded on the CPU: whether it lies in `raw` as it is, is for whoever
    reads it there to find out.
    """
    flat = weight.detach().reshape(-1)
    if raw.is_cpu and flat.is_cpu and flat.dtype == dtype:
        return copy_bytes(raw, flat.view(torch.uint8), of_source=True)
    if not raw.is_cpu:
        raw.view(dtype).copy_(flat)
        return checksum(raw)
    target, step, digest = raw.view(dtype), _PIECE // dtype.itemsize, xxhash.xxh3_64()
    for start in range(0, flat.numel(), step):
        piece = target[start : start + step]
        piece.copy_(flat[start : start + step])
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.intdigest()


@torch.no_grad()
def take(raw: Tensor, target: Tensor) -> int:
    """Copy the bytes `raw` into the contiguous tensor `target`, unless they lie there; the checksum of what arrived."""
    flat = target.detach().view(-1).view(torch.uint8)
    if raw.data_ptr() == flat.data_ptr():
        return checksum(flat)
    if raw.is_cpu and flat.is_cpu:
        return copy_bytes(flat, raw)
    flat.copy_(raw)
    return checksum(flat if raw.device == flat.device else raw)


def copy_bytes(target: Tensor, source: Tensor, of_source: bool = False) -> int:
    """Copy uint8 to uint8 on the CPU; the checksum of `target` afterwards, or of `source`."""
    left, right, digest = target.numpy(), source.numpy(), xxhash.xxh3_64()
    for start in range(0, len(right), _PIECE):
        there, here = left[start : start + _PIECE], right[start : start + _PIECE]
        there[:] = here
        digest.update(here.data if of_source else there.data)
    return digest.intdigest()


def checksum(raw: Tensor) -> int:
    """Of the bytes `raw` where they are, as `put` and `take` give it on that kind of device."""
    return xxhash.xxh3_64_intdigest(raw.numpy().data) if raw.is_cpu else words_checksum(raw)


def words_checksum(raw: Tensor) -> int:
    """The checksum of a GPU; on any device. The factor of a word is odd and a mixture of all bits of its place."""
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    total = raw.numel()
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        places = torch.arange(start + 1, start + 1 + part.numel(), device=raw.device, dtype=torch.int64)
        factors = places * -7046029254386353131  # 2^64 / golden ratio, as a signed number
        factors = (factors ^ (factors >> 29)) * -4658895280553007687 | 1
        total += int((part * factors).sum())
    return total % 2**64
