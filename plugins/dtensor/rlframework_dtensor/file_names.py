"""Weights by the names of files (`rlframework.models.file_names`), out of and into the pieces of a split model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlframework.models.file_names import FileWeight
from rlframework.policy.checkpoint.portable import moments_part
from rlframework.policy.model_state import Moments, Piece
from rlframework_dtensor.shards import local, own_part

Where = tuple[slice, ...]


def here(weight: FileWeight, tensor: Tensor) -> tuple[Tensor, Where] | None:
    """What of `weight` is in this rank's part of `tensor`, its source, sharing its memory, and where that lies in it.

    None: nothing. A weight that is a tensor of the model is never None, though its part may be empty. No collective.
    """
    own, part = own_part(tensor), local(tensor)
    if weight.expert is None:
        return part, own
    experts, rows, columns = own
    if not experts.start <= weight.expert < experts.stop:
        return None
    first, last = max(rows.start, weight.start), min(rows.stop, weight.start + weight.shape[0])
    if first >= last:
        return None
    view = part[weight.expert - experts.start, first - rows.start : last - rows.start]
    return view, (slice(first - weight.start, last - weight.start), columns)


def pieces(weight: FileWeight, tensor: Tensor, prefix: str = "") -> Iterator[Piece]:
    """This rank's part of `weight`, which lies in `tensor`, under its name after `prefix`; nothing, or one piece."""
    if (found := here(weight, tensor.detach())) is not None:
        part, where = found
        yield Piece(prefix + weight.name, part, tuple(one.start for one in where), weight.shape)


@torch.no_grad()
def fill_moments(weights: Iterable[FileWeight], moments: Mapping[str, Moments], first: Tensor, second: Tensor) -> int:
    """Put this rank's part of the `moments` of `weights`, which lie in one tensor, into `first` and `second`.

    The steps that they took. No collective.
    """
    steps = 0
    for weight in weights:
        targets = here(weight, first), here(weight, second)
        where = targets[0][1] if targets[0] is not None else (slice(0, 0),) * len(weight.shape)
        saved = moments_part(moments, weight.name, where)
        steps = max(steps, saved.steps)
        for target, value in zip(targets, (saved.exp_avg, saved.exp_avg_sq), strict=True):
            if target is not None:
                target[0].copy_(value)
    return steps
