"""The layout of weights in a byte buffer, and copying them in and out with a checksum for each.

On a CPU the checksum is 64-bit XXH3, of each block while it is in the processor's cache; on a GPU, the sum of 64-bit
words multiplied by position-dependent factors. Both detect bytes that changed, moved or were reordered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from rlframework.base.errors import RefitError

ALIGNMENT = 512
"""Each weight begins at a multiple of this many bytes, which suits every dtype, vector unit and DMA engine."""

_BLOCK = 256 << 10  # bytes to copy before reading them again for the checksum; fits in one core's private cache
_WORDS_PER_CHUNK = 4 << 20  # 64-bit words per chunk of a GPU checksum

WeightInfo = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name to shape and dtype of each weight as transferred."""


@dataclass(frozen=True)
class Slot:
    """The place of a weight in a buffer: `size` bytes starting at `offset`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size: int

    def of(self, raw: Tensor) -> Tensor:
        """Return the weight's bytes in the buffer `raw`, 1-D uint8."""
        return raw[self.offset : self.offset + self.size]


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size in bytes of a tensor of `shape` and `dtype`."""
    return math.prod(shape) * dtype.itemsize


def sizes_of(info: WeightInfo) -> list[tuple[str, int]]:
    """Return name and size in bytes of each weight."""
    return [(name, bytes_of(shape, dtype)) for name, (shape, dtype) in info.items()]


def aligned(size: int) -> int:
    """Round `size` up to a multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


def group_names(sizes: Iterable[tuple[str, int]], budget: float, alone: float = math.inf) -> list[list[str]]:
    """Group consecutive names into groups of at most `budget` bytes.

    A weight that is larger, or has at least `alone` bytes, forms its own group.
    """
    groups: list[list[str]] = []
    used = math.inf
    for name, size in sizes:
        if size >= alone or used + aligned(size) > budget:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += aligned(size) if size < alone else math.inf
    return groups


def assign_slots(names: Iterable[str], info: WeightInfo) -> list[Slot]:
    """Assign consecutive slots to `names`."""
    slots, offset = [], 0
    for name in names:
        shape, dtype = info[name]
        size = bytes_of(shape, dtype)
        slots.append(Slot(name, tuple(shape), dtype, offset, size))
        offset += aligned(size)
    return slots


def match_slots(slots: Iterable[Slot], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Slot, Tensor]]:
    """Pair each slot with the next of `weights`; raise `RefitError` if its name or shape differs."""
    for slot in slots:
        name, weight = next(weights, ("nothing", None))
        if weight is None or name != slot.name or tuple(weight.shape) != slot.shape:
            got = "" if weight is None else f" of shape {tuple(weight.shape)}"
            raise RefitError(
                f"the training engine gathered {name}{got} instead of {slot.name} of shape {slot.shape}: its "
                "gather_weights and weight_specs disagree"
            )
        yield slot, weight


def layout_checksum(info: WeightInfo) -> int:
    """Hash names, shapes and dtypes in order: sides whose checksums agree use the same byte layout."""
    text = "\n".join(f"{name} {tuple(shape)} {dtype}" for name, (shape, dtype) in info.items())
    return xxhash.xxh3_64_intdigest(text.encode())


def as_bytes(weight: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, 1-D uint8, sharing memory."""
    return weight.detach().view(-1).view(torch.uint8)


@torch.no_grad()
def write_weight(raw: Tensor, weight: Tensor, dtype: torch.dtype) -> int:
    """Write `weight`, cast to `dtype`, into the bytes `raw`; return the checksum of the cast weight.

    On the CPU without a cast, the checksum is of the source and not of what was written: the reader verifies that.
    """
    flat = weight.detach().reshape(-1)
    if raw.is_cpu and flat.is_cpu and flat.dtype == dtype:
        return copy_bytes(raw, flat.view(torch.uint8), of_source=True)
    if not raw.is_cpu:
        raw.view(dtype).copy_(flat)
        return checksum(raw)
    target, step, digest = raw.view(dtype), _BLOCK // dtype.itemsize, xxhash.xxh3_64()
    for start in range(0, flat.numel(), step):
        block = target[start : start + step]
        block.copy_(flat[start : start + step])
        digest.update(block.view(torch.uint8).numpy().data)
    return digest.intdigest()


@torch.no_grad()
def read_weight(raw: Tensor, target: Tensor) -> int:
    """Copy the bytes `raw` into the contiguous `target`, unless they are the same memory; return its checksum."""
    flat = as_bytes(target)
    if raw.data_ptr() == flat.data_ptr():
        return checksum(flat)
    if raw.is_cpu and flat.is_cpu:
        return copy_bytes(flat, raw)
    flat.copy_(raw)
    return checksum(flat if raw.device == flat.device else raw)


def copy_bytes(target: Tensor, source: Tensor, of_source: bool = False) -> int:
    """Copy uint8 to uint8 on the CPU; return the checksum of `target` after the copy, or of `source`."""
    left, right, digest = target.numpy(), source.numpy(), xxhash.xxh3_64()
    for start in range(0, len(right), _BLOCK):
        written, read = left[start : start + _BLOCK], right[start : start + _BLOCK]
        written[:] = read
        digest.update(read.data if of_source else written.data)
    return digest.intdigest()


def checksum(raw: Tensor) -> int:
    """Return the checksum of the bytes `raw`, as `write_weight` and `read_weight` compute it on that device type."""
    return xxhash.xxh3_64_intdigest(raw.numpy().data) if raw.is_cpu else words_checksum(raw)


def words_checksum(raw: Tensor) -> int:
    """Compute the GPU checksum, on any device. Each word's factor is odd and mixes all bits of the word's position."""
    total = raw.numel()
    if raw.numel() % 8 or raw.storage_offset() % 8:  # else without a copy, which takes as much memory as the weight
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    words = raw.view(torch.int64)
    for start in range(0, words.numel(), _WORDS_PER_CHUNK):
        chunk = words[start : start + _WORDS_PER_CHUNK]
        positions = torch.arange(start + 1, start + 1 + chunk.numel(), device=raw.device, dtype=torch.int64)
        factors = positions * -7046029254386353131  # 2^64 / golden ratio, as a signed number
        factors = (factors ^ (factors >> 29)) * -4658895280553007687 | 1
        total += int((chunk * factors).sum())
    return total % 2**64
