"""Ranges of a parameter's elements, counted flat, and the boxes of whole weights that lie in them.

The distributed optimizer has ranges of flat parameters; files and checkpoints know boxes of weights. Parameters here
have one or two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rlframework_megatron.weight_layout import Region, Where, extent, inside


@dataclass(frozen=True)
class Cell:
    """A box of a weight, `whole`, that lies in a flat range of a parameter's elements.

    Element `first` of the range begins a box of `shape`, and `here` is where the weight's box lies in that.
    """

    whole: Where
    first: int
    shape: tuple[int, ...]
    here: Where

    def of(self, flat: Tensor) -> Tensor:
        """It, out of the elements of the range, sharing their memory."""
        return flat[self.first : self.first + math.prod(self.shape)].view(self.shape)[self.here]


def cells(shape: tuple[int, ...], regions: Iterable[Region], start: int, stop: int) -> Iterator[Cell]:
    """What of `regions`, of a parameter of `shape`, lies in its elements `start` to `stop`."""
    regions = tuple(regions)
    first = 0
    for box in boxes(shape, start, stop):
        sizes = tuple(one.stop - one.start for one in box)
        for region in regions:
            if (found := overlap(region, box)) is not None:
                whole, here = found
                yield Cell(whole, first, sizes, inside(here, box))
        first += extent(box)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Where]:
    """The elements `start` to `stop` of a tensor of `shape` as boxes, at most three, in their order."""
    if len(shape) == 1:
        if start < stop:
            yield (slice(start, stop),)
        return
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(width, column + stop - start)
            yield slice(row, row + 1), slice(column, end)
            start += end - column
        else:
            rows = (stop - start) // width
            yield slice(row, row + rows), slice(0, width)
            start += rows * width


def overlap(region: Region, box: Where) -> Region | None:
    """What of `region` lies in `box` of the parameter; None: nothing."""
    whole, here = region
    common = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(here, box, strict=True)]
    if any(start >= stop for start, stop in common):
        return None
    shifts = [outside.start - local.start for outside, local in zip(whole, here, strict=True)]
    moved = tuple(slice(start + shift, stop + shift) for (start, stop), shift in zip(common, shifts, strict=True))
    return moved, tuple(slice(start, stop) for start, stop in common)
