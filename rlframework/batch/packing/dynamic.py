"""Dynamic batching: microbatches of rows of similar length, padded to the longest row, under a cap on padded tokens.

Balanced ones are similar in cost; round-robin ones, the established method, have the same shapes on all shards.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush

import numpy as np

from rlframework.base.errors import BatchError
from rlframework.batch.batch_rows import round_up
from rlframework.batch.packing.lengths import (
    GroupIds,
    Ints,
    Lengths,
    RowGroups,
    TokenCost,
    assign_by_cost,
    read_lengths,
    sort_descending,
    spread_empty,
)

Run = tuple[int, int]  # positions `[start, end)` in the groups sorted by length: one microbatch
PRECISION = 0.004  # relative, of the bisection for the lowest cost level; each step of it passes over all microbatches


def balanced_microbatches(
    lengths: Lengths,
    max_tokens: int,
    *,
    shards: int = 1,
    length_round: int = 1,
    width: int | None = None,
    cost: TokenCost | None = None,
    group_ids: GroupIds | None = None,
) -> list[list[list[int]]]:
    """Return microbatches of row indices, `[shard][step]`: the same number per shard, with similar costs in each step.

    A microbatch is padded to its longest row, rounded up to a multiple of `length_round` but not beyond `width`, the
    columns of the batch; its rows times that length are at most `max_tokens`. The number of microbatches is the least
    that this allows, rounded up to a multiple of `shards`, and their costs are as equal as that number allows. None is
    empty, and its rows are in order of descending length; rows of length 0 are spread over all. No row may, padded,
    exceed `max_tokens`. Raises `BatchError` if there are fewer rows than microbatches.

    Rows with equal `group_ids [rows]` share a microbatch, where they follow each other in the given order. A group is
    as long as its longest row; one of which no row has a token counts as a row of length 0. Up to `shards - 1`
    microbatches are empty if there are too few groups.
    """
    values = read_lengths(lengths, least=0)
    groups = RowGroups.of(group_ids, len(values))
    longest, idle = groups.largest(values), groups.idle(shards)
    ordered, empty = np.split(sort_descending(longest), [np.count_nonzero(longest)])
    padded, sizes = padded_lengths(longest[ordered], length_round, width), groups.sizes[ordered]
    if not groups.alone:
        groups.require(groups.sizes * padded_lengths(longest, length_round, width), max_tokens, "tokens", "max_tokens")
    plan = _Plan(padded, sizes, max_tokens, cost or TokenCost(), shards)
    fewest = len(plan.longest_runs(float("inf")))
    wanted = round_up(max(1, fewest), shards)
    if len(groups) + idle < wanted:
        what = "rows" if groups.alone else "groups of rows"
        raise BatchError(
            f"{len(groups)} {what} cannot fill {wanted} microbatches: they need {fewest}, rounded up to a multiple of "
            f"{shards} shards; use more {what}, raise max_tokens, or use fewer shards"
        )
    runs = plan.even_runs(0, min(wanted, len(ordered))) if fewest else []
    if shards > 1 and len(runs) % shards == 0 and runs:  # greedy runs leave too little for the last of all
        runs[-shards:] = plan.even_runs(runs[-shards][0], shards)
    costs = np.zeros(wanted)
    costs[: len(runs)] = [plan.cost_of(run) for run in runs]
    batches = [ordered[start:end].tolist() for start, end in runs]
    spread_empty(batches, wanted, np.append(empty, len(groups) + np.arange(idle)))
    batches = groups.expand(batches)
    return [[batches[number] for number in numbers] for numbers in assign_by_cost(costs, shards)]


class _Plan:
    """Divides groups into runs by descending length: a run is padded to its first row, so its padding is low.

    `padded [groups]`: the padded length of each group's longest row; `sizes [groups]`: the rows of each.
    """

    def __init__(self, padded: Ints, sizes: Ints, max_tokens: int, cost: TokenCost, shards: int) -> None:
        self._padded: list[int] = padded.tolist()
        costs = cost.of_rows(padded)
        self._costs: list[float] = costs.tolist()  # of one row
        self._totals: list[float] = (costs * sizes).tolist()
        self._before: list[int] = [0, *np.cumsum(sizes).tolist()]  # rows in the groups before each
        self._most, self._shards = max_tokens, shards

    def cost_of(self, run: Run) -> float:
        return (self._before[run[1]] - self._before[run[0]]) * self._costs[run[0]]

    def longest_runs(self, level: float, start: int = 0) -> list[Run]:
        """Divide the groups from `start` on greedily into the longest runs of cost at most `level`.

        Making each run as long as possible gives the fewest runs: a run that starts later has shorter rows, so it
        reaches at least as far. A step takes at least as long as its longest group, so if that costs more than `level`,
        it is the bound for all runs of the step. Takes time proportional to the number of runs, not of rows.
        """
        padded, costs, totals, before, most = self._padded, self._costs, self._totals, self._before, self._most
        runs: list[Run] = []
        bound = level
        while start < len(padded):
            if len(runs) % self._shards == 0:
                bound = max(level, totals[start])
            count = most // padded[start]
            if count * costs[start] > bound:
                count = max(1, int(bound / costs[start]))
            end = max(bisect_right(before, before[start] + count, start) - 1, start + 1)
            runs.append((start, end))
            start = end
        return runs

    def even_runs(self, start: int, wanted: int) -> list[Run]:
        """Divide the groups from `start` on into `wanted` runs, at about the lowest cost level that allows it.

        The higher the level, the fewer runs, so bisection finds it. Then the costliest runs are halved until there are
        `wanted`; those above the level come last, as their steps wait for one long row in any case.
        """
        best = self.longest_runs(float("inf"), start)
        low, high = sum(self._totals[start:]) / wanted, max(map(self.cost_of, best))
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            runs = self.longest_runs(middle, start)
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
    lengths: Lengths, max_tokens: int, *, shards: int = 1, length_round: int = 1, width: int | None = None
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Return the rows of each shard, and the bounds and padded lengths of the microbatches, shared by all shards.

    Shard `i` gets every `shards`-th row from the `i`-th on in ascending order of length, so the rows at position `j` of
    all shards have similar lengths. A microbatch is the same range `[start, end)` of positions in all shards, padded
    for the longest row that any shard has in it. The number of rows must be a multiple of `shards`.
    """
    values = read_lengths(lengths, least=0)
    order = np.argsort(values, kind="stable")
    longest: list[int] = padded_lengths(values[order][shards - 1 :: shards], length_round, width).tolist()
    bounds: list[list[int]] = []
    for position, length in enumerate(longest):  # ascending, so the last is the longest
        if bounds and (position + 1 - bounds[-1][0]) * length <= max_tokens:
            bounds[-1][1] = position + 1
        else:
            bounds.append([position, position + 1])
    return order.reshape(-1, shards).T.tolist(), bounds, [longest[end - 1] for _, end in bounds]


def padded_lengths(lengths: Ints, length_round: int, width: int | None) -> Ints:
    """Return the length each row alone is padded to: a multiple of `length_round`, but at most `width`."""
    padded: Ints = -(-np.maximum(lengths, 1) // length_round) * length_round
    return padded if width is None else np.minimum(padded, width)
