"""Buffers in CPU memory: on a CPU nothing is kept, on a GPU they are pinned. The dtensor plugin counts waiting."""

from __future__ import annotations

import pytest
import torch

from rlframework.policy.host_buffers import HostBuffers

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tensors(device="cpu"):
    made = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int64), "c": torch.ones(0, 4)}
    return {name: tensor.to(device) for name, tensor in (made | {"d": made["a"].bfloat16()}).items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, check_device=False)


def test_on_a_cpu_each_copy_is_a_new_tensor():
    host, given = HostBuffers(), tensors()
    first, second = host.fetch(given), host.fetch(given)
    assert_equal(first, given)
    addresses = [each["a"].data_ptr() for each in (given, first, second)]
    assert len(set(addresses)) == 3


def test_an_exchange_returns_what_was_there():
    given = tensors()
    before = {name: tensor.clone() for name, tensor in given.items()}
    values = {name: tensor + 1 for name, tensor in given.items()}
    assert_equal(HostBuffers().exchange(given, values), before)
    assert_equal(given, values)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_buffers_are_pinned_and_kept():
    host, given = HostBuffers(), tensors("cuda")
    first = host.fetch(given)
    assert_equal(first, given)
    assert all(tensor.is_pinned() for name, tensor in first.items() if name != "c")
    assert_equal(host.moved(first, torch.device("cuda")), given)
    later = {name: tensor + 1 for name, tensor in given.items()}
    second = host.fetch(later)
    assert [each.data_ptr() for each in second.values()] == [each.data_ptr() for each in first.values()]
    assert_equal(second, later)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_both_directions_of_an_exchange_are_ordered():
    """Large enough that copies overlap."""
    host = HostBuffers()
    given = {index: torch.full((1 << 22,), float(index), device="cuda") for index in range(8)}
    values = {index: torch.full((1 << 22,), -float(index)) for index in range(8)}
    for _ in range(3):
        before = host.exchange(given, values)
        torch.cuda.synchronize()
        expected = {index: -tensor for index, tensor in values.items()}
        assert_equal(before, expected)
        assert_equal(given, values)
        values = expected
