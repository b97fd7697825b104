"""Steps in which parameters of a flat tensor have no gradient, against torch's AdamW on tensors of their own."""

from __future__ import annotations

import torch
from torch import nn

from rlframework_deepspeed.partial_steps import Range, ranges_of, step_ranges
from rlframework_deepspeed.shards import MOMENTS, Slot

SIZES = (3, 5, 2)
REACHED = ((0, 1, 2), (0, 2), (1,), (0, 1, 2))
"""The parameters that have a gradient in each step."""


def test_ranges_without_a_gradient_are_left_alone_as_by_torch():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in SIZES]
    apart, flat = [nn.Parameter(one.clone()) for one in values], nn.Parameter(torch.cat(values))
    settings = {"lr": 0.1, "weight_decay": 0.3, "fused": True}
    expected, found = torch.optim.AdamW(apart, **settings), torch.optim.AdamW([flat], **settings)
    starts, steps = (0, 3, 8), [0, 0, 0]
    for reached in REACHED:
        flat.grad = torch.full_like(flat, 7.0)  # what is left of an earlier step
        slots = []
        for number, one in enumerate(apart):
            one.grad = torch.randn(one.shape, generator=generator) if number in reached else None
            slot = Slot(flat, starts[number], SIZES[number], 0)
            if one.grad is not None:
                slot.of(flat.grad).copy_(one.grad)
                slots.append((slot, steps[number]))
                steps[number] += 1
        expected.step()
        step_ranges(found, {id(flat): ranges_of(slots)})
        torch.testing.assert_close(flat.detach(), torch.cat([one.detach() for one in apart]), rtol=1e-6, atol=0)
    for kind in MOMENTS:
        moments = torch.cat([expected.state[one][kind] for one in apart])
        torch.testing.assert_close(found.state[flat][kind], moments, rtol=1e-6, atol=0)
    assert steps == [int(expected.state[one]["step"]) for one in apart] == [3, 3, 3]


def test_neighbours_with_equal_counts_are_one_range():
    holder = torch.zeros(20)
    slots = [(Slot(holder, start, count, 0), steps) for start, count, steps in ((5, 3, 2), (0, 5, 2), (8, 4, 1))]
    slots.append((Slot(holder, 15, 2, 0), 1))  # after a gap
    assert ranges_of(slots) == [Range(0, 8, 2), Range(8, 12, 1), Range(15, 17, 1)]
