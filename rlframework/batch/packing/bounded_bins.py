"""A given number of bins, filled to like cost under a hard cap on their tokens.

Three stages, each O(n log n). Most rows, the longer ones, go to the bin that has cost least so far ("worst fit"), many
rows at a time. The rest fill the bins one after the other up to the level at which all of them would cost the same, to
the token. What is left over then is again placed row by row, where the cost is least and there is room. None of this
looks for the least number of bins: it can fail where `Stock.fill` would find room.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from rlframework.batch.packing.lengths import Floats, Ints, order_by_load, sort_ascending
from rlframework.batch.packing.row_pool import Stock
from rlframework.batch.packing.sorted_rows import Rows

ONE_BY_ONE = 512
"""Up to so many rows are all placed row by row: that levels a little better, and costs next to nothing."""
FILLED_PER_BIN = ((8, 4), (24, 3), (float("inf"), 2))
"""Below so many tokens of slack a bin, so many rows a bin are left for filling: more of them hit the last tokens."""
PLACED_PER_BIN = 3
"""At least so many rows a bin are placed before filling starts, if it is to hit the last tokens."""
MANY_PER_BIN, MANY_PLACED, MANY_FILLED = 12, 6, 8
"""With more rows a bin than the first, at most so many of them are placed by worst fit, and at least so many filled."""
TIGHT, ROOMY = 12, 64
"""Tokens of slack a bin: below the first levelling fails with few rows a bin, above the second stripes are no risk."""
HOPELESS = 16
"""Where the shortest row is longer than so many times the slack, levelling fails whatever the number of rows."""
MOST_STEPS = 32
"""With more steps than these, one that waits for a single row does not matter."""


@dataclass
class State:
    """The bins so far: row numbers; `load [bins]`, their cost; `room [bins]`, tokens that each still takes."""

    bins: list[list[int]]
    load: Floats
    room: Ints


def level(rows: Rows, count: int, capacity: int, group: int) -> list[list[int]] | None:
    """`count` bins of row numbers, none empty, none over `capacity`, of like cost; None if that was not found.

    `group` bins run side by side, so that many bins of like cost take as long as the costliest (`step_levels`).
    """
    slack = capacity - rows.tokens / count
    few = len(rows) // count < FILLED_PER_BIN[0][1] + PLACED_PER_BIN
    hopeless = HOPELESS * slack < rows.lengths[-1] or (few and slack < TIGHT * rows.unit)
    if len(rows) > ONE_BY_ONE and hopeless:
        return None
    levels = step_levels(rows, count, capacity, group)
    bins = level_from(levels, rows, capacity)
    return level_from(np.zeros(count), rows, capacity) if bins is None and levels.any() else bins


def level_from(start: Floats, rows: Rows, capacity: int) -> list[list[int]] | None:
    """As `level`, with bins that have cost `start` already."""
    count = len(start)
    state = State([], start.copy(), np.full(count, capacity, dtype=np.int64))
    if len(rows) <= ONE_BY_ONE:
        state.bins = [[] for _ in range(count)]
        left = rows.numbers, rows.lengths
    else:
        left = fill_to_level(rows, state, place_most(rows, state, capacity - rows.tokens / count))
    return state.bins if place_rest(rows, state, *left) and all(state.bins) else None


def step_levels(rows: Rows, count: int, capacity: int, group: int) -> Floats:
    """Costs `[count]` that the bins are taken to have at the start, so that steps become as short as they can.

    A step of `group` bins takes as long as its costliest row at least. Where that is more than the mean bin, the other
    bins of the step may cost as much for nothing, and all later steps less: so the bins of later steps start higher.
    """
    steps = count // group
    if group == 1 or count % group or not 2 <= steps <= MOST_STEPS or len(rows) <= group:
        return np.zeros(count)
    longest_cost = rows.cost.of_padded(1, int(rows.lengths[0]))
    if longest_cost * count * int(rows.lengths[-1]) <= rows.cost.of_padded(1, int(rows.lengths[-1])) * rows.tokens:
        return np.zeros(count)  # even if all tokens were as cheap as those of the shortest row
    total = left = float(rows.costs.sum())
    if longest_cost * count <= total:
        return np.zeros(count)
    upto = np.cumsum(rows.costs)
    others = slice(group, None)  # what a full bin without one of the longest rows costs
    most = capacity * float(rows.costs[others].sum()) / float(rows.lengths[others].sum())
    levels = np.zeros(steps)
    for step in range(steps):
        mean = left / (count - step * group)
        first = int(np.searchsorted(upto, (total - left) * (1 + 1e-12), side="right"))  # the longest row left
        if first >= len(rows) or rows.costs[first] <= mean:
            levels[step:] = mean
            break
        levels[step] = max(mean, min(float(rows.costs[first]), most))
        longest = np.zeros(group)
        longest[: len(rows) - first] = rows.costs[first : first + group]
        left = max(0.0, left - float(np.maximum(longest, levels[step]).sum()))
    return np.repeat(levels.max() - levels, group)


def place_most(rows: Rows, state: State, slack: float) -> int:
    """Place the longer rows, by worst fit and in stripes; returns how many. The others are left for filling.

    The less `slack` there is, tokens a bin, the more are left, as filling is what hits the last tokens of room.
    With many rows a bin, stripes are the faster. They start where the lengths that are left for them differ by less
    than half of what filling then adds to each bin, so that filling can make up for it.
    """
    count, total = len(state.load), len(rows)
    each = total // count
    stripes = 0
    if each > MANY_PER_BIN:
        end = total - MANY_FILLED * count
        enough = int(rows.lengths[end:].sum()) // (2 * count) + int(rows.lengths[end - 1])
        first = int(np.count_nonzero(rows.lengths[:end] > enough))
        if first <= MANY_PLACED * count and slack > ROOMY * rows.unit:
            stripes = (end - first) // count
        first = min(first, MANY_PLACED * count)
    else:
        filled = min(next(number for most, number in FILLED_PER_BIN if slack < most * rows.unit), each - 2)
        first = total - filled * count if filled > 1 else total
    done = worst_fit(rows, state, first)
    if stripes and done == first:
        done += stripe(rows, state, first, stripes)
    return done


def worst_fit(rows: Rows, state: State, stop: int) -> int:
    """Place rows, each in turn in the bin of least load that has room for it, up to row `stop`; returns how many.

    A round sorts the bins with room by load and gives one row to each, as far as that is what row by row would do:
    until a bin has more load than one that just got a row. Ends early when a round places too few rows to be worth it,
    or a row fits no bin.
    """
    load, room = state.load, state.room
    where = np.empty(stop, dtype=np.int64)
    done = 0
    while done < stop:
        able = np.flatnonzero(room >= rows.lengths[done])
        if not len(able):
            break
        able = able[order_by_load(load[able])[: stop - done]]
        end = done + len(able)
        before = load[able]
        after = np.minimum.accumulate(before + rows.costs[done:end])
        overtaken = before[1:] > after[:-1]
        if overtaken.any():
            end = done + int(overtaken.argmax()) + 1
            able = able[: end - done]
        load[able] += rows.costs[done:end]
        room[able] -= rows.lengths[done:end]
        where[done:end] = able
        done = end
        if len(able) < max(2, len(load) // 8):
            break
    state.bins = gather(rows.numbers[:done], where[:done], len(load)) if done else [[] for _ in load]
    return done


def stripe(rows: Rows, state: State, start: int, stripes: int) -> int:
    """Give each bin `stripes` of the next rows, to and fro over the bins, starting from the one of least load.

    Returns how many were placed: none if a bin has no room for its part.
    """
    count = len(state.load)
    end = start + stripes * count
    order = np.argsort(state.load, kind="stable")
    lengths = rows.lengths[start:end].reshape(stripes, count)
    tokens = lengths[::2].sum(axis=0) + lengths[1::2].sum(axis=0)[::-1]
    if (tokens > state.room[order]).any():
        return 0
    state.room[order] -= tokens
    mean = int(lengths[stripes // 2, count // 2])  # all parts are of like lengths: a token costs the same in each
    state.load[order] += rows.cost.of_padded(1, mean) / mean * tokens
    numbers = rows.numbers[start:end].reshape(stripes, count).copy()
    numbers[1::2] = numbers[1::2, ::-1]
    for number, more in zip(order.tolist(), numbers.T.tolist(), strict=True):
        state.bins[number] += more
    return end - start


def gather(numbers: Ints, where: Ints, count: int) -> list[list[int]]:
    """`count` bins: `numbers[i]` goes to bin `where[i]`; each bin keeps their order."""
    order = np.argsort(where.astype(np.uint16) if count <= 2**16 else where, kind="stable")
    ends = np.cumsum(np.bincount(where, minlength=count)).tolist()
    listed = numbers[order].tolist()
    return [listed[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def fill_to_level(rows: Rows, state: State, done: int) -> tuple[Ints, Ints]:
    """Fill the bins with the rows from `done` on, tightest bin first; returns what is left over, and its lengths."""
    if done == len(rows):
        return rows.numbers[done:], rows.lengths[done:]
    stock = Stock(rows.numbers[done:], rows.lengths[done:])
    tokens = int(rows.lengths[done:].sum())
    unit = float(rows.cost.of_rows(rows.lengths[done:]).sum()) / tokens
    limits = level_limits(state, unit, tokens) + 1  # above what rounding down has cut off
    able = np.flatnonzero(limits >= rows.lengths[-1])
    able = able[sort_ascending(limits[able])]
    used = stock.fill(limits[able].tolist(), state.room[able].tolist(), map(state.bins.__getitem__, able.tolist()))
    if stock.left:  # so all bins were gone over
        tokens_used = np.array(used, dtype=np.int64)
        state.room[able] -= tokens_used
        state.load[able] += unit * tokens_used
    return stock.rest()


def level_limits(state: State, unit: float, tokens: int) -> Ints:
    """Tokens `[bins]` that each bin should still get, so that `tokens` at a cost of `unit` each make all bins equal.

    Each bin takes tokens from the level of its load on until it is full: what all take up to a level is piecewise
    linear in it.
    """
    wanted = (float(state.load.mean()) + unit * tokens / len(state.load) - state.load) / unit
    if wanted.min() >= 0 and (wanted <= state.room).all():  # no bin is full or above the level
        limits: Ints = wanted.astype(np.int64)
        return limits
    full = state.load + unit * state.room
    points = np.concatenate((state.load, full))
    order = np.argsort(points)
    points = points[order]
    open_bins = np.cumsum(np.where(order < len(full), 1.0, -1.0))
    taken = np.concatenate(([0.0], np.cumsum(open_bins[:-1] * np.diff(points)))) / unit
    at = np.interp(tokens, taken, points)
    limits = np.clip((at - state.load) / unit, 0, state.room).astype(np.int64)
    return limits  # noqa: RET504 - numpy calls it Any


def place_rest(rows: Rows, state: State, left: Ints, lengths: Ints) -> bool:
    """Place the rows `left`, by descending length, row by row where the load is least; False if one fits no bin.

    A bin of least load that has no room for a row gets rows only when no other bin has room: then the roomiest first.
    """
    if not len(left):
        return True
    costs = rows.cost.of_rows(lengths).tolist()
    able = np.flatnonzero(state.room >= lengths[-1])
    room: dict[int, int] = dict(zip(able.tolist(), state.room[able].tolist(), strict=True))
    lightest: list[tuple[float, int]] = list(zip(state.load[able].tolist(), room, strict=True))
    heapify(lightest)
    roomiest: list[tuple[int, int]] = []

    def rank(row: int) -> int:
        return -int(rows.by_number[row])

    for row, length, cost in zip(left.tolist(), lengths.tolist(), costs, strict=True):
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
