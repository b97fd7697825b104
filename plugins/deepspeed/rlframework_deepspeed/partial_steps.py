"""An optimizer step in which some parameters have no gradient: they keep their weights, moments and counts of steps.

In torch each parameter is a tensor of its own, and AdamW leaves out those without a gradient. A tensor of ZeRO's
optimizer has many parameters one after the other, a gradient that is zero where a parameter has none, and one count of
steps. So in such a step, and in all steps once counts differ, AdamW updates ranges of these tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlframework_deepspeed.shards import MOMENTS, Slot, state_of


@dataclass(frozen=True)
class Range:
    """The elements `start` to `stop` of an optimizer's tensor, whose parameters have taken `steps` steps."""

    start: int
    stop: int
    steps: int


def ranges_of(slots: Iterable[tuple[Slot, int]]) -> list[Range]:
    """Return the ranges of one tensor's `slots`, each with its count of steps; join neighbours of equal counts."""
    ordered = sorted((slot.offset, slot.offset + slot.count, steps) for slot, steps in slots)
    joined: list[Range] = []
    for start, stop, steps in ordered:
        if joined and joined[-1].stop == start and joined[-1].steps == steps:
            joined[-1] = Range(joined[-1].start, stop, steps)
        else:
            joined.append(Range(start, stop, steps))
    return joined


@torch.no_grad()
def step_ranges(adam: torch.optim.Optimizer, ranges: Mapping[int, Sequence[Range]]) -> None:
    """Step `adam`, an AdamW, on the `ranges` of each of its flat tensors, by the tensor's id, and on nothing else."""
    for group in adam.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for holder in group["params"]:
            if holder.grad is not None and ranges.get(id(holder)):
                _step_tensor(holder, state_of(adam, holder), settings, ranges[id(holder)])


def _step_tensor(holder: Tensor, state: dict[str, Tensor], settings: dict[str, Any], ranges: Sequence[Range]) -> None:
    """Step AdamW on `ranges` of `holder`, as views of it, its gradient and its moments."""
    assert holder.grad is not None
    parts = [nn.Parameter(holder.detach()[one.start : one.stop]) for one in ranges]
    adam = torch.optim.AdamW([{**settings, "params": parts}])
    for part, one in zip(parts, ranges, strict=True):
        part.grad = holder.grad[one.start : one.stop]
        adam.state[part] = {kind: state[kind][one.start : one.stop] for kind in MOMENTS}
        adam.state[part]["step"] = torch.full_like(state["step"], one.steps)
    adam.step()
