"""Dynamic batches: microbatches of rows of like length, padded to their longest row, under a cap on padded tokens.

`balanced_microbatches` is ours: contiguous runs of the rows sorted by length, of like cost, dealt by cost.
`round_robin_microbatches` is the way known from elsewhere, in which all shards share the bounds of their microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, cycle
from typing import Any

import numpy as np

from rlframework.batch.packing.assignment import deal_by_cost
from rlframework.batch.packing.cost import TokenCost, read_cost
from rlframework.batch.packing.lengths import LONGEST, Ints, read_count, read_lengths, round_up, sort_descending
from rlframework.errors import BatchError

Run = tuple[int, int]
"""Rows `[start, end)` of those sorted by length."""

PRECISION = 0.004
"""How near to the lowest level of cost that is possible it is searched for; each halving goes over all microbatches."""


def balanced_microbatches(
    lengths: Sequence[int] | Any,
    max_tokens: int,
    *,
    shards: int = 1,
    length_round: int = 1,
    width: int | None = None,
    cost: TokenCost | None = None,
) -> list[list[list[int]]]:
    """Microbatches of row numbers, `[shard][step]`: equally many a shard, none empty, like costs at each step.

    A microbatch is padded to its longest row, rounded up to a multiple of `length_round` but not beyond `width` (the
    columns that there are); rows times that length are at most `max_tokens`. There are as few microbatches as that
    allows, rounded up to a multiple of `shards`, with costs (`TokenCost.of_padded`) as alike as that number allows.
    Within a microbatch rows go by descending length. Rows of length 0 take no room: they are spread over all.

    `BatchError` for a row that alone is over `max_tokens`, and for fewer rows than microbatches.
    """
    values = read_lengths(lengths, least=0)
    shards, most = read_count(shards, "shards", 1), read_count(max_tokens, "max_tokens", 1)
    order = sort_descending(values)
    rows = order[: np.count_nonzero(values)]
    plan = _Plan(padded_lengths(values[rows], most, length_round, width), most, read_cost(cost))
    fewest = len(plan.runs(float("inf"), shards))
    wanted = round_up(max(1, fewest), shards)
    if len(values) < wanted:
        raise BatchError(
            f"{len(values)} rows cannot make {wanted} microbatches that are not empty: {fewest} hold them, and each of "
            f"{shards} shards gets as many; give more rows, or raise max_tokens"
        )
    runs = plan.level(min(wanted, len(rows)), shards)
    listed = rows.tolist()
    batches = [listed[start:end] for start, end in runs]
    batches += [[] for _ in range(wanted - len(batches))]
    hollow = [batch for batch in batches if not batch]
    for row, batch in zip(order[len(rows) :].tolist(), chain(hollow, cycle(batches)), strict=False):
        batch.append(row)
    costs = np.array([plan.cost_of(run) for run in runs] + [0.0] * len(hollow))
    return [[batches[number] for number in numbers] for numbers in deal_by_cost(costs, shards)]


def padded_lengths(lengths: Ints, max_tokens: int, length_round: Any, width: Any) -> Ints:
    """What rows of `lengths` are padded to, alone; `BatchError` for what is over `max_tokens` or `width`."""
    multiple = read_count(length_round, "length_round", 1, LONGEST)
    padded = -(-np.maximum(lengths, 1) // multiple) * multiple
    if width is not None:
        columns = min(read_count(width, "width", 0), LONGEST)
        if len(lengths) and int(lengths.max()) > columns:
            raise BatchError(f"a row has {int(lengths.max())} tokens, but width says that there are {columns} columns")
        padded = np.minimum(padded, columns)
    if len(padded) and int(padded.max()) > max_tokens:
        raise BatchError(
            f"a row of {int(lengths.max())} tokens is padded to {int(padded.max())} (length_round {multiple}), but "
            f"max_tokens is {max_tokens}: raise it, or shorten the row"
        )
    return padded


class _Plan:
    """Rows by descending padded length, and how runs of them become microbatches."""

    def __init__(self, padded: Ints, max_tokens: int, cost: TokenCost) -> None:
        self._padded: list[int] = padded.tolist()
        self._most = max_tokens
        self._cost = cost
        self._costs: list[float] = cost.of_rows(padded).tolist()

    def cost_of(self, run: Run) -> float:
        """What the run costs as a microbatch."""
        return self._cost.of_padded(run[1] - run[0], self._padded[run[0]])

    def runs(self, level: float, shards: int, start: int = 0) -> list[Run]:
        """Runs as long as they can be that cost at most `level`, or as much as one row of their step if that is more.

        Takes time by the number of runs, not of rows. The greedy choice is the best: a run that starts later may have
        more rows, so the fewest runs are those that each reach as far as they can.
        """
        padded, costs, most, rows = self._padded, self._costs, self._most, len(self._padded)
        runs: list[Run] = []
        bound = level
        while start < rows:
            if len(runs) % shards == 0:  # a step takes as long as its costliest microbatch: the others may cost as much
                bound = max(level, costs[start])
            count = most // padded[start]
            if count * costs[start] > bound:
                count = max(1, int(bound / costs[start]))
            end = min(start + count, rows)
            runs.append((start, end))
            start = end
        return runs

    def level(self, wanted: int, shards: int) -> list[Run]:
        """`wanted` runs (not more than rows) of about the lowest level of cost at which so few are enough.

        The runs of the last step, of which the very last has what was left over, get a level of their own.
        """
        if not self._padded:
            return []
        runs = self._lowest(0, wanted, shards)
        if shards == 1 or wanted % shards:
            return runs
        return runs[:-shards] + self._lowest(runs[-shards][0], shards, shards)

    def _lowest(self, start: int, wanted: int, shards: int) -> list[Run]:
        best = self.runs(float("inf"), shards, start)
        low, high = sum(self._costs[start:]) / wanted, max(map(self.cost_of, best))
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            runs = self.runs(middle, shards, start)
            if len(runs) <= wanted:
                best, high = runs, middle
            else:
                low = middle
        return self._split(best, wanted, high)

    def _split(self, runs: list[Run], wanted: int, level: float) -> list[Run]:
        """Halve the costliest run of two and more rows until there are `wanted`; those above `level` are the last.

        They are in steps that wait for one long row anyway.
        """

        def entry(run: Run) -> tuple[bool, float, Run]:
            cost = self.cost_of(run)
            return (cost > level, -cost, run)

        done = [run for run in runs if run[1] - run[0] == 1]
        heap = [entry(run) for run in runs if run[1] - run[0] > 1]
        heapify(heap)
        while len(done) + len(heap) < wanted:
            start, end = heappop(heap)[-1]
            middle = (start + end) // 2
            for run in ((start, middle), (middle, end)):
                if run[1] - run[0] > 1:
                    heappush(heap, entry(run))
                else:
                    done.append(run)
        return sorted([*done, *(run for _, _, run in heap)])


def round_robin_microbatches(
    lengths: Sequence[int] | Any,
    max_tokens: int,
    *,
    shards: int = 1,
    length_round: int = 1,
    width: int | None = None,
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The known way: the rows of each shard, and of the microbatches of all shards the bounds and padded lengths.

    Rows sorted ascending are dealt in turn: shard `i` gets every `shards`-th from the `i`-th on, so that the rows at
    position `j` of all shards are neighbours. Microbatches `[start, end)` of positions are the same in all shards, by
    the longest row that any shard has at a position. The number of rows must be a multiple of `shards`: `BatchError`.
    """
    values = read_lengths(lengths, least=0)
    shards, most = read_count(shards, "shards", 1), read_count(max_tokens, "max_tokens", 1)
    if len(values) % shards:
        raise BatchError(
            f"{len(values)} rows cannot be dealt to {shards} shards evenly; give a multiple of {shards}, or use "
            "balanced microbatches"
        )
    order = np.argsort(values, kind="stable")
    longest: list[int] = padded_lengths(values[order][shards - 1 :: shards], most, length_round, width).tolist()
    bounds: list[list[int]] = []
    for position, length in enumerate(longest):  # ascending, so the latest is the longest
        if bounds and (position + 1 - bounds[-1][0]) * length <= most:
            bounds[-1][1] = position + 1
        else:
            bounds.append([position, position + 1])
    rows = [order[shard::shards].tolist() for shard in range(shards)]
    return rows, bounds, [longest[end - 1] for _, end in bounds]
