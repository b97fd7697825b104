"""The shards of weights and moments on this rank: where flat memory has them, and filling them from saved tensors.

Engines and optimizers keep ranges of flattened tensors, while files, checkpoints and other layouts address rectangular
slices of weights. A `TensorShard` is such a slice, sharing the memory that is trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlframework.policy.checkpoint.saved import SavedMoments, slice_of
from rlframework.policy.engine import Moments, TensorShard

Slices = tuple[slice, ...]
"""A rectangular part of a tensor, one slice per dimension."""
Region = tuple[Slices, Slices]
"""Slices of a whole weight, and the slices of equal shape of the tensor that stores them."""


@torch.no_grad()
def fill_weights(shards: Iterable[TensorShard], weights: Mapping[str, Tensor]) -> None:
    """Copy the `shards` of whole `weights`, by name, into their memory; reads no more than these from files."""
    for shard in shards:
        shard.local.copy_(slice_of(weights, shard.name, shard.where))


@torch.no_grad()
def fill_moments(shards: Iterable[TensorShard], moments: Mapping[str, Moments]) -> None:
    """Copy the `shards` of `moments` into their memory, named `FIRST` or `SECOND` and the weight's name."""
    for shard in shards:
        if isinstance(moments, SavedMoments):
            shard.local.copy_(moments.tensors.read_slice(shard.name, shard.where))
        else:
            kind, _, weight = shard.name.partition(".")
            shard.local.copy_(getattr(moments[weight], kind)[shard.where])


def steps_of(moments: Mapping[str, Moments], names: Collection[str]) -> int:
    """Return the largest number of optimizer steps of the weights `names`, without reading their moments."""
    steps = moments.steps if isinstance(moments, SavedMoments) else {name: moments[name].steps for name in names}
    return max(steps[name] for name in names)


def flat_shards(
    name: str,
    shape: tuple[int, ...],
    flat: Tensor,
    start: int,
    stored: tuple[int, ...] = (),
    regions: Iterable[Region] | None = None,
) -> Iterator[TensorShard]:
    """Yield the shards of the weight `name` of `shape` in `flat`, a tensor's elements from `start` on.

    `stored`: the shape of that tensor, and `regions`: what it has of the weight; None: it is the whole weight.
    """
    if regions is None:
        stored, whole = shape, tuple(slice(0, size) for size in shape)
        regions = ((whole, whole),)
    regions, first = tuple(regions), 0
    for block in range_blocks(stored, start, start + flat.numel()):
        sizes = [one.stop - one.start for one in block]
        view = flat[first : first + math.prod(sizes)].view(sizes)
        first += math.prod(sizes)
        for whole, local in regions:
            common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(local, block, strict=True)]
            if all(one.start < one.stop for one in common):
                inside = tuple(
                    slice(one.start - b.start, one.stop - b.start) for one, b in zip(common, block, strict=True)
                )
                offset = tuple(one.start - a.start + w.start for one, a, w in zip(common, local, whole, strict=True))
                yield TensorShard(name, view[inside], offset, shape)


def range_blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Slices]:
    """Split the elements `start` to `stop` of a tensor of `shape` into few rectangular blocks, in order.

    At most two more for each dimension after the first.
    """
    if len(shape) < 2:
        if start < stop:
            yield (slice(start, stop),) * len(shape)
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
