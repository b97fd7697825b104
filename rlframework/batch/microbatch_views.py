"""A batch's planned microbatches as views: which rows they are, checked before the first is asked for, and how wide.

The plan is made by `sharding` and carried by the batch. Joining the rows of a pack is the data processor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from rlframework.batch import batch_rows
from rlframework.errors import BatchError

PartT = TypeVar("PartT")


class PlannedBatch(Protocol):
    """The attributes of `BatchedDataDict` that are read here."""

    data: dict[str, Any]
    micro_batch_indices: list[list[list[int]]] | None
    micro_batch_lengths: list[list[int]] | None
    micro_batch_input_key: str | None


def views(
    data: Mapping[str, Any], ranges: Iterable[Sequence[int]], make: Callable[[dict[str, Any]], PartT]
) -> Iterator[PartT]:
    """Rows `[start, end)` of all values for each of the `ranges`, which are known to be right."""
    values = list(data.items())  # what is set or moved later does not get in
    return (make({key: value[start:end] for key, value in values}) for start, end in ranges)


def truncated_views(
    batch: PlannedBatch,
    ranges: Sequence[Sequence[int]],
    lengths: Sequence[int],
    dim: int,
    make: Callable[[dict[str, Any]], PartT],
) -> Iterator[PartT]:
    """The same with the sequences cut to the microbatch's length at dimension `dim`."""
    cut = set(_sequences(batch, dim, max(lengths, default=0)))
    values = [(key, value, key in cut) for key, value in batch.data.items()]
    between = (slice(None),) * (dim - 1)

    def part(start: int, end: int, length: int) -> PartT:
        whole = slice(start, end)
        narrow = (whole, *between, slice(length))
        return make({key: value[narrow if is_cut else whole] for key, value, is_cut in values})

    return (part(start, end, length) for (start, end), length in zip(ranges, lengths, strict=True))


def planned(batch: PlannedBatch, caller: str) -> tuple[list[list[int]], list[int]]:
    """The row ranges and lengths of the microbatches of `batch`, which is one global batch; else a `BatchError`."""
    indices, lengths = batch.micro_batch_indices, batch.micro_batch_lengths
    how = (
        "take a shard of shard_by_batch_size(..., dynamic_batching_args=... or sequence_packing_args=...), and of that "
        "get_batch(k) for each global batch k"
    )
    if indices is None or lengths is None:
        raise BatchError(
            f"{caller}: this batch has no metadata of microbatches: {how}. slice, select_indices and other methods "
            "that make a new batch drop them"
        )
    if len(indices) != 1 or len(lengths) != 1:
        raise BatchError(f"{caller} needs one global batch, and this has the microbatches of {len(indices)}: {how}")
    size = batch_rows.count_rows(batch.data)
    ends = [0, *(end for _, end in indices[0])]
    starts = [start for start, _ in indices[0]]
    if starts != ends[:-1] or ends != sorted(ends) or ends[-1] != size or len(lengths[0]) != len(starts):
        raise BatchError(
            f"{caller}: the microbatches {indices[0]} with lengths {lengths[0]} do not fit the batch of {size} rows, "
            f"which was changed since they were planned: {how}"
        )
    return indices[0], lengths[0]


def _sequences(batch: PlannedBatch, dim: int, longest: int) -> list[str]:
    """The keys whose dimension `dim` is the sequence: as wide as the planned input, or else as the widest."""
    widths = {k: v.shape[dim] for k, v in batch.data.items() if isinstance(v, torch.Tensor) and v.ndim > dim > 0}
    names = (batch.micro_batch_input_key, "input_ids")
    width = next((widths[name] for name in names if name in widths), max(widths.values(), default=0))
    if width < longest or dim < 1:
        raise BatchError(
            f"the microbatches are up to {longest} wide at dimension {dim}, where the sequences are {width}; "
            "`sequence_dim` must be the dimension that was planned for, and the batch not truncated since"
        )
    return [key for key, found in widths.items() if found == width]
