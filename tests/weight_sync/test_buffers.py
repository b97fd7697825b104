"""Groups of names, slots in a buffer, and checksums that detect moved and changed bytes."""

from __future__ import annotations

import pytest
import torch

from rlframework.weight_sync.buffers import (
    ALIGNMENT,
    assign_slots,
    checksum,
    group_names,
    layout_checksum,
    read_weight,
    words_checksum,
    write_weight,
)

BUDGET = 4 * ALIGNMENT


def test_consecutive_names_share_a_group_while_they_fit_with_their_alignment():
    sizes = [("a", ALIGNMENT), ("b", 2 * ALIGNMENT), ("c", 1), ("d", 1), ("large", 99 * ALIGNMENT), ("e", 1)]
    assert group_names(sizes, BUDGET) == [["a", "b", "c"], ["d"], ["large"], ["e"]]


def test_slots_are_aligned_and_do_not_overlap():
    info = {"odd": ((3, 5), torch.bfloat16), "none": ((0, 4), torch.float32), "number": ((), torch.int64)}
    slots = assign_slots(info, info)
    assert [(slot.offset, slot.size) for slot in slots] == [(0, 30), (ALIGNMENT, 0), (ALIGNMENT, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_comes_out_as_it_went_in_rounded_once(dtype):
    weight = torch.randn(700, 300)  # several blocks
    raw = torch.zeros(weight.numel() * dtype.itemsize, dtype=torch.uint8)
    target = torch.empty(weight.shape, dtype=dtype)
    assert write_weight(raw, weight, dtype) == read_weight(raw, target) == checksum(raw)
    assert torch.equal(target.view(torch.uint8), weight.to(dtype).view(torch.uint8))


def test_weights_of_any_shape_layout_and_dtype_go_through():
    for weight in (torch.tensor(7), torch.empty(0, 3), torch.randn(4, 6).t(), torch.tensor([True, False, True])):
        raw = torch.zeros(weight.numel() * weight.dtype.itemsize, dtype=torch.uint8)
        target = torch.empty(weight.shape, dtype=weight.dtype)
        assert write_weight(raw, weight, weight.dtype) == read_weight(raw, target)
        assert torch.equal(target, weight)


@pytest.mark.parametrize("sum_of", [checksum, words_checksum], ids=["on a CPU", "on a GPU"])
def test_a_checksum_detects_changed_moved_and_swapped_bytes(sum_of):
    raw = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    raw[8:16], raw[24:32] = 1, 2
    changed, swapped = raw.clone(), raw.clone()
    changed[-1] ^= 1
    swapped[8:16], swapped[24:32] = 2, 1
    damaged = [changed, swapped, raw.roll(1), raw.roll(8), raw.flip(0), torch.zeros_like(raw), raw[:-1]]
    assert len({sum_of(data) for data in (raw, *damaged)}) == 1 + len(damaged)
    assert sum_of(raw) == sum_of(raw.clone())
    assert sum_of(torch.zeros(8, dtype=torch.uint8)) != sum_of(torch.zeros(16, dtype=torch.uint8))


def test_the_layout_checksum_depends_on_names_order_shapes_and_dtypes():
    info = {"a": ((2, 3), torch.float32), "b": ((6,), torch.float32)}
    others = [
        {"b": info["b"], "a": info["a"]},
        {**info, "a": ((3, 2), torch.float32)},
        {**info, "b": ((6,), torch.bfloat16)},
        {"a": info["a"]},
    ]
    assert len({layout_checksum(layout) for layout in (info, *others)}) == 5
