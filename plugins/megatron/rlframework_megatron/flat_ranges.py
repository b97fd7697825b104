"""Map flat element ranges of a parameter to rectangular slices of whole weights.

The distributed optimizer shards flat parameters into element ranges; files and checkpoints address slices of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rlframework_megatron.weight_layout import Region, Slices, extent, inside


@dataclass(frozen=True)
class FlatBlock:
    """The slice `whole` of a weight that is stored in a flat range of a parameter's elements.

    Element `first` of the range starts a block of `shape`; `local_slices` locates the weight's slice in that block.
    """

    whole: Slices
    first: int
    shape: tuple[int, ...]
    local_slices: Slices

    def of(self, flat: Tensor) -> Tensor:
        """The slice as a view of `flat`, the elements of the range."""
        return flat[self.first : self.first + math.prod(self.shape)].view(self.shape)[self.local_slices]


def flat_blocks(shape: tuple[int, ...], regions: Iterable[Region], start: int, stop: int) -> Iterator[FlatBlock]:
    """Yield the intersections of `regions` of a parameter of `shape` with its elements `start` to `stop`."""
    regions = tuple(regions)
    first = 0
    for block in range_blocks(shape, start, stop):
        sizes = tuple(one.stop - one.start for one in block)
        for region in regions:
            if (found := overlap(region, block)) is not None:
                whole, local_slices = found
                yield FlatBlock(whole, first, sizes, inside(local_slices, block))
        first += extent(block)


def range_blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Slices]:
    """Split the elements `start` to `stop` of a tensor of `shape` into few rectangular blocks, in order.

    At most two more for each dimension after the first.
    """
    if len(shape) == 1:
        if start < stop:
            yield (slice(start, stop),)
        return
    width = math.prod(shape[1:])
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(width, column + stop - start)
            yield from ((slice(row, row + 1), *block) for block in range_blocks(shape[1:], column, end))
            start += end - column
        else:
            rows = (stop - start) // width
            yield slice(row, row + rows), *(slice(0, size) for size in shape[1:])
            start += rows * width


def overlap(region: Region, block: Slices) -> Region | None:
    """The part of `region` inside `block` of the parameter; None if they are disjoint."""
    whole, local_slices = region
    common = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(local_slices, block, strict=True)]
    if any(start >= stop for start, stop in common):
        return None
    shifts = [outside.start - local.start for outside, local in zip(whole, local_slices, strict=True)]
    moved = tuple(slice(start + shift, stop + shift) for (start, stop), shift in zip(common, shifts, strict=True))
    return moved, tuple(slice(start, stop) for start, stop in common)
