"""Who gets what when: bins or microbatches of known costs are dealt to shards that run step by step together."""

from __future__ import annotations

import numpy as np

from rlframework.batch.packing.lengths import Floats


def deal_by_cost(costs: Floats, shards: int) -> list[list[int]]:
    """Numbers of the bins with `costs [bins]` for each shard, `[shard][step]`; `bins` is a multiple of `shards`.

    The bins are sorted by cost, and each step takes the next `shards` of them: all shards have bins of like cost at
    each step, the costliest first. Within a step the costliest bin goes to the shard that has had least so far.
    """
    order = np.argsort(-costs, kind="stable").reshape(-1, shards)
    had = [0.0] * shards
    ranked = list(range(shards))  # the shards by what they have had so far
    takers: list[int] = []
    for values in costs[order].tolist():
        ranked.sort(key=had.__getitem__)
        takers += ranked
        for shard, value in zip(ranked, values, strict=True):
            had[shard] += value
    dealt = np.empty((shards, len(order)), dtype=np.int64)
    dealt[np.array(takers, dtype=np.int64).reshape(order.shape), np.arange(len(order))[:, None]] = order
    listed: list[list[int]] = dealt.tolist()
    return listed
