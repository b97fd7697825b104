"""Views of a batch's planned microbatches; the plan is checked before the first one is made.

`sharding` makes the plan and the batch carries it. The data processor joins the rows of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from rlframework.batch import batch_rows
from rlframework.errors import BatchError

BatchT = TypeVar("BatchT")


class PlannedBatch(Protocol):
    """The attributes of `BatchedDataDict` that this module reads."""

    data: dict[str, Any]
    micro_batch_indices: list[list[list[int]]] | None
    micro_batch_lengths: list[list[int]] | None
    micro_batch_input_key: str | None


def views(
    data: Mapping[str, Any], ranges: Iterable[Sequence[int]], make: Callable[[dict[str, Any]], BatchT]
) -> Iterator[BatchT]:
    """Yield rows `[start, end)` of all values for each of the `ranges`, which must be valid."""
    values = list(data.items())  # values set or moved during the iteration are not seen
    return (make({key: value[start:end] for key, value in values}) for start, end in ranges)


def truncated_views(
    batch: PlannedBatch,
    ranges: Sequence[Sequence[int]],
    lengths: Sequence[int],
    dim: int,
    make: Callable[[dict[str, Any]], BatchT],
) -> Iterator[BatchT]:
    """As `views`, with sequences truncated to the length of the microbatch at dimension `dim`."""
    sequences = set(_sequence_keys(batch, dim, max(lengths, default=0)))
    values = [(key, value, key in sequences) for key, value in batch.data.items()]
    between = (slice(None),) * (dim - 1)

    def microbatch(start: int, end: int, length: int) -> BatchT:
        rows = slice(start, end)
        truncated = (rows, *between, slice(length))
        return make({key: value[truncated if is_sequence else rows] for key, value, is_sequence in values})

    return (microbatch(start, end, length) for (start, end), length in zip(ranges, lengths, strict=True))


def planned(batch: PlannedBatch, caller: str) -> tuple[list[list[int]], list[int]]:
    """Return row ranges and lengths of the microbatches of one global batch; raise `BatchError` for any other."""
    indices, lengths = batch.micro_batch_indices, batch.micro_batch_lengths
    how = (
        "use get_batch(k), for each global batch k, of a shard of shard_by_batch_size(..., dynamic_batching_args=...) "
        "or shard_by_batch_size(..., sequence_packing_args=...)"
    )
    if indices is None or lengths is None:
        raise BatchError(
            f"{caller}: this batch has no microbatch metadata; {how}. slice, select_indices and other methods that "
            "make a new batch drop it"
        )
    if len(indices) != 1 or len(lengths) != 1:
        raise BatchError(
            f"{caller} needs one global batch, but this batch has the microbatches of {len(indices)}; {how}"
        )
    size = batch_rows.count_rows(batch.data)
    ends = [0, *(end for _, end in indices[0])]
    starts = [start for start, _ in indices[0]]
    if starts != ends[:-1] or ends != sorted(ends) or ends[-1] != size or len(lengths[0]) != len(starts):
        raise BatchError(
            f"{caller}: the microbatches {indices[0]} with lengths {lengths[0]} do not fit the batch of {size} rows, "
            f"which was changed since they were planned; {how}"
        )
    return indices[0], lengths[0]


def _sequence_keys(batch: PlannedBatch, dim: int, longest: int) -> list[str]:
    """Return the keys whose dimension `dim` is the sequence: as wide as the planned input, else as the widest."""
    widths = {k: v.shape[dim] for k, v in batch.data.items() if isinstance(v, torch.Tensor) and v.ndim > dim > 0}
    names = (batch.micro_batch_input_key, "input_ids")
    width = next((widths[name] for name in names if name in widths), max(widths.values(), default=0))
    if width < longest or dim < 1:
        raise BatchError(
            f"the microbatches are up to {longest} wide at dimension {dim}, where the sequences are {width}; pass the "
            "`sequence_dim` that they were planned for, and do not truncate the batch after planning"
        )
    return [key for key, found in widths.items() if found == width]
