"""How Megatron stores a weight in a tensor-parallel rank's parameter: which slice of the whole goes where.

Megatron fuses matrices: the rows of `linear_qkv` are, for each key-value group, its query heads, key and value; the
rows of `linear_fc1` on each rank are its shard of the gate followed by its shard of `up`. Tensor ranks split the rows
of fused matrices, and the columns of `linear_proj` and `linear_fc2`, equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlframework.base.errors import ConfigError
from rlframework.engine import Region, Slices


@dataclass(frozen=True)
class WeightLayout:
    """How a weight lies in a parameter of which each tensor rank has an equal share; by default each has all of it.

    Along the dimension `split`, the parameter consists of `groups`, each of blocks in the proportions of `pattern`. The
    weight is all first blocks of its `blocks`, then all second ones, and so on.
    """

    split: int | None = None
    """The dimension that tensor ranks split; None: they replicate the weight."""
    pattern: tuple[int, ...] = (1,)
    blocks: tuple[int, ...] = (0,)
    groups: int | None = None
    """None: one on each rank."""
    is_padded: bool = False
    """Whether the parameter may have more rows than the weight."""

    @property
    def joins_layers(self) -> bool:
        """Whether the weight is several layers of other models, one after the other."""
        return len(self.blocks) > 1

    def regions(self, shape: tuple[int, ...], rank: int, size: int, padded: int = 0) -> Iterator[Region]:
        """Yield the regions of a weight of `shape` on tensor rank `rank` of `size`; none if the rank holds nothing.

        `padded`: the parameter's rows on all ranks, if they are more than the weight's.
        """
        if self.split is None:
            yield (everything := _along(None, 0, 0, shape)), everything
            return
        units = max(shape[self.split], padded) // sum(self.pattern[block] for block in self.blocks)
        groups, unit = (size, _share(units, size)) if self.groups is None else (self.groups, units // self.groups)
        width = sum(self.pattern) * unit
        share, outside = _share(groups * width, size), 0
        for block in self.blocks:
            length = self.pattern[block] * unit
            for group in range(groups):
                begin = group * width + sum(self.pattern[:block]) * unit
                start = max(begin, rank * share)
                whole = outside + start - begin
                stop = min(begin + length, (rank + 1) * share, start + shape[self.split] - whole)
                if start < stop:
                    local = _along(self.split, start - rank * share, stop - start, shape)
                    yield _along(self.split, whole, stop - start, shape), local
                outside += length


REPLICATED, ROWS, COLUMNS = WeightLayout(), WeightLayout(split=0), WeightLayout(split=1)
VOCABULARY = WeightLayout(split=0, is_padded=True)
GATE, UP, GATE_UP = (WeightLayout(split=0, pattern=(1, 1), blocks=blocks) for blocks in ((0,), (1,), (0, 1)))
"""The halves of `linear_fc1`, and both as one matrix."""


def grouped(groups: int, queries: int, head: int, *blocks: int) -> WeightLayout:
    """The `blocks` of `linear_qkv`, 0 to 2: a group has the rows of its `queries`, then `head` of key and of value."""
    return WeightLayout(split=0, pattern=(queries, head, head), blocks=blocks, groups=groups)


def _along(dim: int | None, start: int, count: int, shape: tuple[int, ...]) -> Slices:
    """The slices of a tensor of `shape` with `count` elements of the dimension `dim` from `start` on."""
    return tuple(slice(start, start + count) if one == dim else slice(0, size) for one, size in enumerate(shape))


def _share(extent: int, size: int) -> int:
    share, left = divmod(extent, size)
    if left:
        raise ConfigError(
            f"a dimension of {extent} is not divisible by policy.parallelism.tensor={size}; choose a divisor of it"
        )
    return share


def extent(where: Slices) -> int:
    """The number of elements in `where`."""
    return math.prod(one.stop - one.start for one in where)


def inside(block: Slices, outer: Slices) -> Slices:
    """The slices of `box` relative to `outer`, which contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(block, outer, strict=True))
