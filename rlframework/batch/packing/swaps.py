"""The last per cent of a small batch: rows change places between bins, as long as that makes the costliest cheaper."""

from __future__ import annotations

import numpy as np

from rlframework.batch.packing.lengths import Floats, Ints
from rlframework.batch.packing.sorted_rows import Rows

MOST_ROWS = 256
"""Up to so many rows it is done: it takes a few milliseconds, and with more rows there is less to be had."""
TRIES = 32
"""So many times the costliest bin is looked at."""


def even_out(rows: Rows, bins: list[list[int]], start: Floats, capacity: int) -> list[list[int]]:
    """`bins` after swaps of two rows, and moves of one, each of which lowers the costliest bin that can be lowered.

    `start [bins]` is added to the cost of each bin. No bin gets over `capacity`, none is emptied.
    """
    count, size = len(bins), len(rows.by_number)
    # After the rows comes, for each bin, a row of nothing, which a row may be swapped for.
    lengths = np.concatenate((rows.by_number, np.zeros(count, dtype=np.int64)))
    costs = rows.cost.of_rows(lengths)
    where = np.concatenate((np.full(size, -1), np.arange(count)))
    for number, members in enumerate(bins):
        where[members] = number
    placed = where >= 0
    load = start + np.bincount(where[placed], costs[placed], count)
    room = capacity - np.bincount(where[placed], lengths[placed], count).astype(np.int64)
    hopeless = np.zeros(count, dtype=bool)
    for _ in range(TRIES):
        if hopeless.all():
            break
        top = int(np.where(hopeless, -1.0, load).argmax())
        swap = best_swap(top, lengths, costs, where, load, room)
        if swap is None:
            hopeless[top] = True
            continue
        mine, theirs = swap
        other = where[theirs]
        load[[top, other]] += np.array([-1, 1]) * (costs[mine] - costs[theirs])
        room[[top, other]] += np.array([1, -1]) * (lengths[mine] - lengths[theirs])
        where[mine] = other
        if theirs < size:
            where[theirs] = top
        hopeless[other] = False
    evened: list[list[int]] = [[] for _ in bins]
    for number, row in zip(where[rows.numbers].tolist(), rows.numbers.tolist(), strict=True):
        evened[number].append(row)
    return evened


def best_swap(top: int, lengths: Ints, costs: Floats, where: Ints, load: Floats, room: Ints) -> tuple[int, int] | None:
    """A row of bin `top` and one of another bin, so that the costlier of both bins gets as cheap as it can."""
    size = len(where) - len(load)
    mine = np.flatnonzero(where[:size] == top)
    theirs = np.flatnonzero((where != top) & (where >= 0))
    if len(mine) == 1:
        theirs = theirs[theirs < size]  # its only row is not given away for nothing
    if not len(theirs):
        return None
    cheaper = costs[mine][:, None] - costs[theirs]
    shorter = lengths[mine][:, None] - lengths[theirs]
    other = where[theirs]
    after = np.maximum(load[top] - cheaper, load[other] + cheaper)
    after[shorter > room[other]] = np.inf  # bin `top` gives away the longer row, as that is what makes it cheaper
    best = int(after.argmin())
    if not after.flat[best] < load[top] * (1 - 1e-9):
        return None
    return int(mine[best // len(theirs)]), int(theirs[best % len(theirs)])
