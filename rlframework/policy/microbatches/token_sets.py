"""Microbatches whose head computes log-probabilities of a set of tokens at each position, besides the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlframework.interfaces.data_processor import Microbatch
from rlframework.policy.microbatches.on_demand import Made, on_device, on_host


def with_token_sets(microbatches: Sequence[Microbatch], name: str, device: torch.device) -> Sequence[Microbatch]:
    """Return `microbatches`, on `device`, with targets `[N, 1 + K]`: those they have, then the sets of their positions.

    The sets are the value `name` of their rows, `[b, S', K]`: K ids of tokens at the position of the token that is
    predicted. Engines compute what they are given targets for, so nothing else of them depends on sets.
    """
    host = on_host(microbatches)

    def make(index: int) -> Microbatch:
        microbatch = host[index]
        sets = microbatch.data_dict[name].flatten(0, 1)[microbatch.scatter].long()
        return replace(microbatch, targets=torch.cat((microbatch.targets[:, None], sets), 1))

    return on_device(Made(len(host), make), device)
