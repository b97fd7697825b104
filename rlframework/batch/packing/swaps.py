"""Local search for small batches: swap rows between bins while that makes the costliest bin cheaper."""

from __future__ import annotations

import numpy as np

from rlframework.batch.packing.lengths import Floats, Ints
from rlframework.batch.packing.row_pool import SortedRows

MOST_ROWS = 256
"""The most rows of a batch it is used for: it takes milliseconds, and gains less the more rows there are."""
TRIES = 32
"""The most iterations, each of which looks for a swap of the costliest bin."""


def improve_by_swaps(rows: SortedRows, bins: list[list[int]], start: Floats, capacity: int) -> list[list[int]]:
    """Return `bins` after swaps and moves of rows, each of which makes the costliest bin that can be improved cheaper.

    `start [bins]` is added to the cost of each bin. No bin exceeds `capacity`, and none is emptied.

    Hill climbing on the costliest bin: placing rows in order of length never revisits a choice, and with few rows a
    single one can decide how long a step takes. All swaps of a bin are compared at once as a matrix. A bin that no swap
    improves is skipped until a swap with another bin has changed it.
    """
    count, size = len(bins), len(rows.lengths_by_index)
    # Entries from `size` on are placeholders of length 0, one per bin: swapping a row for one of them moves the row.
    lengths = np.concatenate((rows.lengths_by_index, np.zeros(count, dtype=np.int64)))
    costs = rows.cost.of_rows(lengths)
    where = np.concatenate((np.full(size, -1), np.arange(count)))
    for number, members in enumerate(bins):
        where[members] = number
    placed = where >= 0  # rows of length 0 are not in a bin yet
    load = start + np.bincount(where[placed], costs[placed], count)
    room = capacity - np.bincount(where[placed], lengths[placed], count).astype(np.int64)
    exhausted = np.zeros(count, dtype=bool)
    for _ in range(TRIES):
        if exhausted.all():
            break
        top = int(np.where(exhausted, -1.0, load).argmax())
        swap = best_swap(top, lengths, costs, where, load, room)
        if swap is None:
            exhausted[top] = True
            continue
        given, taken = swap
        other = where[taken]
        load[[top, other]] += np.array([-1, 1]) * (costs[given] - costs[taken])
        room[[top, other]] += np.array([1, -1]) * (lengths[given] - lengths[taken])
        where[given] = other
        if taken < size:
            where[taken] = top
        exhausted[other] = False
    improved: list[list[int]] = [[] for _ in bins]
    for number, row in zip(where[rows.indices].tolist(), rows.indices.tolist(), strict=True):
        improved[number].append(row)
    return improved


def best_swap(top: int, lengths: Ints, costs: Floats, where: Ints, load: Floats, room: Ints) -> tuple[int, int] | None:
    """Return the row of bin `top` and the row of another bin whose swap makes the costlier of the two bins cheapest.

    None if no swap within `room` leaves both bins cheaper than bin `top` is now.
    """
    size = len(where) - len(load)
    own = np.flatnonzero(where[:size] == top)
    others = np.flatnonzero((where != top) & (where >= 0))
    if len(own) == 1:
        others = others[others < size]  # a bin's only row may be swapped, but not moved
    if not len(others):
        return None
    cheaper = costs[own][:, None] - costs[others]
    shorter = lengths[own][:, None] - lengths[others]
    other = where[others]
    after = np.maximum(load[top] - cheaper, load[other] + cheaper)
    after[shorter > room[other]] = np.inf  # only `other` can overflow: `top` gets cheaper, so it gives the longer row
    best = int(after.argmin())
    if not after.flat[best] < load[top] * (1 - 1e-9):
        return None
    return int(own[best // len(others)]), int(others[best % len(others)])
