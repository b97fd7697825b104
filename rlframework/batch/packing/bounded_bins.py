"""Fill a given number of bins to equal cost, under a hard cap on their tokens.

Three stages, each O(n log n):

1. The longer rows, most of all rows, each go to the bin with the least cost so far ("worst fit"), many rows at a time.
2. The shorter rows fill one bin after another, exactly up to the level at which all bins would cost the same.
3. Rows that remain are again placed one by one, in the bin of least cost that has room.

Long rows first, because a bin that is short of cost can be corrected with short rows, but not with long ones. The
number of bins is never reduced or raised: where `RowPool.fill` would find room for all rows, these stages may fail to.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from rlframework.batch.packing.lengths import Floats, Ints, order_by_load, sort_ascending
from rlframework.batch.packing.row_pool import RowPool, SortedRows

ONE_BY_ONE = 512
"""Up to this many rows, all are placed one by one: slightly better balanced, and still cheap."""
FILLED_PER_BIN = ((8, 4), (24, 3), (float("inf"), 2))
"""(slack, rows): below this slack per bin, this many rows per bin are kept for filling. More rows fill bins better."""
PLACED_PER_BIN = 3
"""Filling only hits the cap exactly if at least this many rows per bin are placed before it."""
MANY_PER_BIN, MANY_PLACED, MANY_FILLED = 12, 6, 8
"""With more rows per bin than the first, at most the second are placed by worst fit and at least the third filled."""
TIGHT, ROOMY = 12, 64
"""Slack in tokens per bin: below the first, few rows per bin cannot be balanced; above the second, snaking is safe."""
HOPELESS = 16
"""Balancing fails, whatever the number of rows, if the shortest row is longer than this many times the slack."""
MOST_STEPS = 32
"""With more steps than this, a single step that waits for one long row does not matter."""


@dataclass
class BinState:
    """The bins so far: their row indices, `load [bins]` their costs, and `room [bins]` the tokens each still takes."""

    bins: list[list[int]]
    load: Floats
    room: Ints


def balance_bins(rows: SortedRows, count: int, capacity: int, group: int) -> list[list[int]] | None:
    """Return `count` bins of row indices of similar cost, none empty, none over `capacity`; None if this fails.

    `group` bins run in parallel in each step: see `initial_loads`.
    """
    slack = capacity - rows.tokens / count
    few = len(rows) // count < FILLED_PER_BIN[0][1] + PLACED_PER_BIN
    hopeless = HOPELESS * slack < rows.lengths[-1] or (few and slack < TIGHT * rows.granularity)
    if len(rows) > ONE_BY_ONE and hopeless:
        return None
    loads = initial_loads(rows, count, capacity, group)
    bins = balance_from(loads, rows, capacity)
    return balance_from(np.zeros(count), rows, capacity) if bins is None and loads.any() else bins


def balance_from(loads: Floats, rows: SortedRows, capacity: int) -> list[list[int]] | None:
    """Like `balance_bins`, with bins that start with a cost of `loads [bins]`."""
    count = len(loads)
    state = BinState([], loads.copy(), np.full(count, capacity, dtype=np.int64))
    if len(rows) <= ONE_BY_ONE:
        state.bins = [[] for _ in range(count)]
        remaining = rows.indices, rows.lengths
    else:
        remaining = fill_to_level(rows, state, place_long_rows(rows, state, capacity - rows.tokens / count))
    return state.bins if place_remaining(rows, state, *remaining) and all(state.bins) else None


def initial_loads(rows: SortedRows, count: int, capacity: int, group: int) -> Floats:
    """Return costs `[count]` that the bins are assumed to have at the start, so that the sum of step times is least.

    A step of `group` bins takes at least as long as its costliest row. If that row costs more than the mean bin, the
    other bins of its step can be filled up to the same cost without making the step longer, and each later step gets
    less work. So the bins of step `s` have a target cost `targets[s]` that falls from step to step. Balancing makes the
    sum of initial load and work equal in all bins; starting each bin at `max(targets) - targets[s]` therefore gives it
    work of about `targets[s]`.
    """
    steps = count // group
    if group == 1 or count % group or not 2 <= steps <= MOST_STEPS or len(rows) <= group:
        return np.zeros(count)
    longest_cost = rows.cost.of_padded(1, int(rows.lengths[0]))
    if longest_cost * count * int(rows.lengths[-1]) <= rows.cost.of_padded(1, int(rows.lengths[-1])) * rows.tokens:
        return np.zeros(count)  # below the mean even if all tokens are as cheap as those of the shortest row
    total = left = float(rows.costs.sum())
    if longest_cost * count <= total:
        return np.zeros(count)
    cumulative = np.cumsum(rows.costs)
    others = slice(group, None)  # the cost of a bin filled to the cap without one of the longest rows
    most = capacity * float(rows.costs[others].sum()) / float(rows.lengths[others].sum())
    targets = np.zeros(steps)
    for step in range(steps):
        mean = left / (count - step * group)
        # The steps so far have taken `total - left`, the longest rows first: the next row is the longest that remains.
        first = int(np.searchsorted(cumulative, (total - left) * (1 + 1e-12), side="right"))
        if first >= len(rows) or rows.costs[first] <= mean:
            targets[step:] = mean  # no row dominates any more: the remaining bins share the remaining cost equally
            break
        targets[step] = max(mean, min(float(rows.costs[first]), most))
        longest = np.zeros(group)
        longest[: len(rows) - first] = rows.costs[first : first + group]
        left = max(0.0, left - float(np.maximum(longest, targets[step]).sum()))
    return np.repeat(targets.max() - targets, group)


def place_long_rows(rows: SortedRows, state: BinState, slack: float) -> int:
    """Place the longer rows, by worst fit and then in snaking order; return how many. The others are for filling.

    The less `slack` in tokens per bin, the more rows are kept for filling, which is the stage that uses the last tokens
    of room. With many rows per bin, snaking is faster than worst fit. It starts at the first row from which lengths
    differ by less than half of what filling then adds to each bin, so that filling can compensate for the difference.
    """
    count, total = len(state.load), len(rows)
    each = total // count
    rounds = 0
    if each > MANY_PER_BIN:
        end = total - MANY_FILLED * count
        enough = int(rows.lengths[end:].sum()) // (2 * count) + int(rows.lengths[end - 1])
        first = int(np.count_nonzero(rows.lengths[:end] > enough))
        if first <= MANY_PLACED * count and slack > ROOMY * rows.granularity:
            rounds = (end - first) // count
        first = min(first, MANY_PLACED * count)
    else:
        filled = min(next(number for most, number in FILLED_PER_BIN if slack < most * rows.granularity), each - 2)
        first = total - filled * count if filled > 1 else total
    done = worst_fit(rows, state, first)
    if rounds and done == first:
        done += place_snaking(rows, state, first, rounds)
    return done


def worst_fit(rows: SortedRows, state: BinState, stop: int) -> int:
    """Place rows up to row `stop`, each in the bin of least load that has room; return how many were placed.

    Works in rounds of vectorized operations. A round sorts the bins that have room by load and gives the k-th row to
    the k-th bin. That is what placing row by row would do until a bin that got a row in this round has less load than
    the next bin in order: the round is cut there, and the next one sorts again. Ends early if a round places too few
    rows to be worth its cost, or if a row fits no bin.
    """
    load, room = state.load, state.room
    where = np.empty(stop, dtype=np.int64)
    done = 0
    while done < stop:
        able = np.flatnonzero(room >= rows.lengths[done])  # the longest row of the round: the others fit these bins too
        if not len(able):
            break
        able = able[order_by_load(load[able])[: stop - done]]
        end = done + len(able)
        before = load[able]
        lowest_after = np.minimum.accumulate(before + rows.costs[done:end])
        overtaken = before[1:] > lowest_after[:-1]
        if overtaken.any():
            end = done + int(overtaken.argmax()) + 1
            able = able[: end - done]
        load[able] += rows.costs[done:end]
        room[able] -= rows.lengths[done:end]
        where[done:end] = able
        done = end
        if len(able) < max(2, len(load) // 8):
            break
    state.bins = group_by_bin(rows.indices[:done], where[:done], len(load)) if done else [[] for _ in load]
    return done


def place_snaking(rows: SortedRows, state: BinState, start: int, rounds: int) -> int:
    """Give each bin `rounds` of the next rows, back and forth over the bins, starting with the bin of least load.

    Reversing the direction in each round lets the longer row of one round make up for the shorter one of the other.
    Returns how many rows were placed: none if any bin has too little room.
    """
    count = len(state.load)
    end = start + rounds * count
    order = np.argsort(state.load, kind="stable")
    lengths = rows.lengths[start:end].reshape(rounds, count)
    tokens = lengths[::2].sum(axis=0) + lengths[1::2].sum(axis=0)[::-1]
    if (tokens > state.room[order]).any():
        return 0
    state.room[order] -= tokens
    middle = int(lengths[rounds // 2, count // 2])  # rows of similar length: one cost per token will do
    state.load[order] += rows.cost.of_padded(1, middle) / middle * tokens
    indices = rows.indices[start:end].reshape(rounds, count).copy()
    indices[1::2] = indices[1::2, ::-1]
    for number, more in zip(order.tolist(), indices.T.tolist(), strict=True):
        state.bins[number] += more
    return end - start


def group_by_bin(indices: Ints, where: Ints, count: int) -> list[list[int]]:
    """Return `count` bins: row `indices[i]` goes to bin `where[i]`, in the given order within each bin."""
    order = np.argsort(where.astype(np.uint16) if count <= 2**16 else where, kind="stable")
    ends = np.cumsum(np.bincount(where, minlength=count)).tolist()
    listed = indices[order].tolist()
    return [listed[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def fill_to_level(rows: SortedRows, state: BinState, done: int) -> tuple[Ints, Ints]:
    """Fill the bins with the rows from `done` on; return the rows that remain, and their lengths.

    These rows are short and of similar length, so each token is counted at their mean cost: a level of cost becomes a
    limit in tokens. The bin with the lowest limit is filled first, while all lengths are available to hit it; tokens
    that it could not use raise the limits of the bins after it.
    """
    if done == len(rows):
        return rows.indices[done:], rows.lengths[done:]
    pool = RowPool(rows.indices[done:], rows.lengths[done:])
    tokens = int(rows.lengths[done:].sum())
    unit = float(rows.cost.of_rows(rows.lengths[done:]).sum()) / tokens
    limits = fill_limits(state, unit, tokens) + 1  # makes up for rounding down
    able = np.flatnonzero(limits >= rows.lengths[-1])
    able = able[sort_ascending(limits[able])]
    used = pool.fill(limits[able].tolist(), state.room[able].tolist(), map(state.bins.__getitem__, able.tolist()))
    if pool.remaining:  # so all bins were visited, and `used` has an entry for each
        tokens_used = np.array(used, dtype=np.int64)
        state.room[able] -= tokens_used
        state.load[able] += unit * tokens_used
    return pool.rest()


def fill_limits(state: BinState, unit: float, tokens: int) -> Ints:
    """Return the tokens `[bins]` to add to each bin so that `tokens`, each at a cost of `unit`, make all bins equal.

    The level is found as if pouring water into basins: a bin takes tokens from the level of its load up to the level at
    which it is full. So the tokens that all bins take up to a level are a piecewise linear function of it, whose slope
    grows by one at each load and falls by one at each full level; interpolating its inverse at `tokens` gives the
    level.
    """
    wanted = (float(state.load.mean()) + unit * tokens / len(state.load) - state.load) / unit
    if wanted.min() >= 0 and (wanted <= state.room).all():  # no bin is above the level, and none gets full below it
        limits: Ints = wanted.astype(np.int64)
        return limits
    full = state.load + unit * state.room
    points = np.concatenate((state.load, full))
    order = np.argsort(points)
    points = points[order]
    open_bins = np.cumsum(np.where(order < len(full), 1.0, -1.0))
    taken = np.concatenate(([0.0], np.cumsum(open_bins[:-1] * np.diff(points)))) / unit
    level = np.interp(tokens, taken, points)
    limits = np.clip((level - state.load) / unit, 0, state.room).astype(np.int64)
    return limits  # noqa: RET504 - numpy's stubs make the expression Any


def place_remaining(rows: SortedRows, state: BinState, indices: Ints, lengths: Ints) -> bool:
    """Place the rows `indices`, by descending length, one by one in the bin of least load; False if one fits no bin.

    A bin that is the lightest but has no room for a row is moved to a second heap, ordered by room. Lengths descend, so
    it may have room for a later row; but its load says little about where rows fit, so it gets rows only when no bin of
    the first heap has room, the roomiest bin first.
    """
    if not len(indices):
        return True
    costs = rows.cost.of_rows(lengths).tolist()
    able = np.flatnonzero(state.room >= lengths[-1])
    room: dict[int, int] = dict(zip(able.tolist(), state.room[able].tolist(), strict=True))
    lightest: list[tuple[float, int]] = list(zip(state.load[able].tolist(), room, strict=True))
    heapify(lightest)
    roomiest: list[tuple[int, int]] = []

    def rank(row: int) -> int:
        return -int(rows.lengths_by_index[row])

    for row, length, cost in zip(indices.tolist(), lengths.tolist(), costs, strict=True):
        while lightest and room[lightest[0][1]] < length:
            _, number = heappop(lightest)
            heappush(roomiest, (-room[number], number))
        if lightest:
            before, number = lightest[0]
            heapreplace(lightest, (before + cost, number))
        elif roomiest and -roomiest[0][0] >= length:
            number = roomiest[0][1]
            heapreplace(roomiest, (length - room[number], number))
        else:
            return False
        room[number] -= length
        insort(state.bins[number], row, key=rank)
    return True
