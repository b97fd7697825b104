"""Dynamic batching: microbatches of rows of similar length, padded to the longest row, under a cap on padded tokens.

`balanced_microbatches` makes runs of similar cost from the rows sorted by length, and assigns them to shards by cost.
`round_robin_microbatches` is the established method, in which the microbatches of all shards have the same shapes.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from rlframework.batch.packing.lengths import (
    LONGEST,
    Ints,
    Lengths,
    TokenCost,
    assign_by_cost,
    read_cost,
    read_count,
    read_lengths,
    round_up,
    sort_descending,
    spread_empty,
)
from rlframework.errors import BatchError

Run = tuple[int, int]
"""Positions `[start, end)` in the rows sorted by length: one microbatch."""
PRECISION = 0.004
"""Relative precision of the bisection for the lowest cost level; each step of it passes over all microbatches."""


def balanced_microbatches(
    lengths: Lengths,
    max_tokens: int,
    *,
    shards: int = 1,
    length_round: int = 1,
    width: int | None = None,
    cost: TokenCost | None = None,
) -> list[list[list[int]]]:
    """Return microbatches of row indices, `[shard][step]`: the same number per shard, with similar costs in each step.

    A microbatch is padded to its longest row, rounded up to a multiple of `length_round` but not beyond `width`, the
    columns of the batch; its rows times that length are at most `max_tokens`. The number of microbatches is the least
    that this allows, rounded up to a multiple of `shards`, and their costs (`TokenCost.of_padded`) are as equal as that
    number allows. No microbatch is empty. Rows within a microbatch are in order of descending length. Rows of
    length 0 are spread over all microbatches.

    Raises `BatchError` if one row alone exceeds `max_tokens`, and if there are fewer rows than microbatches.
    """
    values = read_lengths(lengths, least=0)
    shards, most = read_count(shards, "shards", 1), read_count(max_tokens, "max_tokens", 1)
    rows, empty = np.split(sort_descending(values), [np.count_nonzero(values)])
    plan = _Plan(padded_lengths(values[rows], most, length_round, width), most, read_cost(cost))
    fewest = len(plan.runs(float("inf"), shards))
    wanted = round_up(max(1, fewest), shards)
    if len(values) < wanted:
        raise BatchError(
            f"{len(values)} rows cannot fill {wanted} microbatches: they need {fewest}, rounded up to a multiple of "
            f"{shards} shards; use more rows, raise max_tokens, or use fewer shards"
        )
    runs = plan.balanced_runs(min(wanted, len(rows)), shards)
    unused = wanted - len(runs)
    batches = [rows[start:end].tolist() for start, end in runs] + [[] for _ in range(unused)]
    spread_empty(batches, empty.tolist())
    costs = np.array([plan.cost_of(run) for run in runs] + [0.0] * unused)
    return [[batches[number] for number in numbers] for numbers in assign_by_cost(costs, shards)]


def padded_lengths(lengths: Ints, max_tokens: int, length_round: int, width: int | None) -> Ints:
    """Return the length each row alone is padded to; raise `BatchError` if one exceeds `max_tokens` or `width`."""
    multiple = read_count(length_round, "length_round", 1, LONGEST)
    padded = -(-np.maximum(lengths, 1) // multiple) * multiple
    if width is not None:
        columns = min(read_count(width, "width", 0), LONGEST)
        if len(lengths) and int(lengths.max()) > columns:
            raise BatchError(f"a row has {int(lengths.max())} tokens, but the batch has a width of {columns} columns")
        padded = np.minimum(padded, columns)
    if len(padded) and int(padded.max()) > max_tokens:
        raise BatchError(
            f"a row of {int(lengths.max())} tokens is padded to {int(padded.max())} (length_round {multiple}), but "
            f"max_tokens is {max_tokens}: raise max_tokens or shorten the row"
        )
    return padded


class _Plan:
    """Divides rows, by descending padded length, into runs, one per microbatch.

    Sorting by length first is what keeps padding low: a run is padded to its first row, and its other rows are the next
    shorter ones.
    """

    def __init__(self, padded: Ints, max_tokens: int, cost: TokenCost) -> None:
        self._padded: list[int] = padded.tolist()
        self._most = max_tokens
        self._costs: list[float] = cost.of_rows(padded).tolist()

    def cost_of(self, run: Run) -> float:
        """Return the cost of the run as a microbatch."""
        return (run[1] - run[0]) * self._costs[run[0]]

    def runs(self, level: float, shards: int, start: int = 0) -> list[Run]:
        """Divide the rows from `start` on greedily into the longest runs of cost at most `level`.

        A row that alone costs more than `level` sets the bound for all runs of its step. Making each run as long as
        possible gives the fewest runs: a run that starts later has shorter rows, so it reaches at least as far. Takes
        time proportional to the number of runs, not of rows.
        """
        padded, costs, most, rows = self._padded, self._costs, self._most, len(self._padded)
        runs: list[Run] = []
        bound = level
        while start < rows:
            if len(runs) % shards == 0:  # a step takes at least as long as its longest row: all its runs may cost that
                bound = max(level, costs[start])
            count = most // padded[start]
            if count * costs[start] > bound:
                count = max(1, int(bound / costs[start]))
            end = min(start + count, rows)
            runs.append((start, end))
            start = end
        return runs

    def balanced_runs(self, wanted: int, shards: int) -> list[Run]:
        """Return `wanted` runs, at most one per row, at about the lowest cost level at which that many suffice.

        Greedy runs leave too little for the very last one, so the runs of the last step get a separate level.
        """
        if not self._padded:
            return []
        runs = self._lowest(0, wanted, shards)
        if shards == 1 or wanted % shards:
            return runs
        return runs[:-shards] + self._lowest(runs[-shards][0], shards, shards)

    def _lowest(self, start: int, wanted: int, shards: int) -> list[Run]:
        """Bisect for the lowest level (the higher it is, the fewer runs); halve runs until there are `wanted`.

        The costliest runs are halved first, but those above the level last: their steps wait for one long row anyway.
        """
        best = self.runs(float("inf"), shards, start)
        low, high = sum(self._costs[start:]) / wanted, max(map(self.cost_of, best))
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            runs = self.runs(middle, shards, start)
            if len(runs) <= wanted:
                best, high = runs, middle
            else:
                low = middle

        def entry(run: Run) -> tuple[bool, bool, float, Run]:
            return (run[1] - run[0] == 1, self.cost_of(run) > high, -self.cost_of(run), run)

        heap = [entry(run) for run in best]
        heapify(heap)
        while len(heap) < wanted:
            first, last = heappop(heap)[-1]
            heappush(heap, entry((first, (first + last) // 2)))
            heappush(heap, entry(((first + last) // 2, last)))
        return sorted(run for *_, run in heap)


def round_robin_microbatches(
    lengths: Lengths,
    max_tokens: int,
    *,
    shards: int = 1,
    length_round: int = 1,
    width: int | None = None,
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Return the rows of each shard, and the bounds and padded lengths of the microbatches, shared by all shards.

    Shard `i` gets every `shards`-th row from the `i`-th on in ascending order of length, so the rows at position `j` of
    all shards have similar lengths. A microbatch is the same range `[start, end)` of positions in all shards, padded
    for the longest row that any shard has in it. Raises `BatchError` unless the number of rows is a multiple of
    `shards`.
    """
    values = read_lengths(lengths, least=0)
    shards, most = read_count(shards, "shards", 1), read_count(max_tokens, "max_tokens", 1)
    if len(values) % shards:
        raise BatchError(
            f"{len(values)} rows do not divide evenly among {shards} shards; use a multiple of {shards} rows, or "
            "balanced microbatches"
        )
    order = np.argsort(values, kind="stable")
    longest: list[int] = padded_lengths(values[order][shards - 1 :: shards], most, length_round, width).tolist()
    bounds: list[list[int]] = []
    for position, length in enumerate(longest):  # ascending, so the last is the longest
        if bounds and (position + 1 - bounds[-1][0]) * length <= most:
            bounds[-1][1] = position + 1
        else:
            bounds.append([position, position + 1])
    rows = [order[shard::shards].tolist() for shard in range(shards)]
    return rows, bounds, [longest[end - 1] for _, end in bounds]
