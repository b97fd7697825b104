"""Packed rows in one kernel: its arguments, tested with a stand-in that follows torch's documentation."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rlframework.models import attention


def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """`varlen_attn` as documented, one sequence and one query at a time: `[T, heads, D]` in and out."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    left, right = window_size
    assert right == 0
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or enable_gqa
    output = torch.empty_like(query)
    for start, end in pairwise(cu_seq_q.tolist()):
        for at in range(start, end):
            first = start if left < 0 else max(start, at - left)
            for head in range(query.shape[1]):
                keys, values = (part[first : at + 1, head // groups] for part in (key, value))
                output[at, head] = torch.softmax(keys @ query[at, head] * scale, 0) @ values
    return output


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_kernel_gets_the_arguments_of_the_attention_by_sequence(monkeypatch, kv_heads, window):
    torch.manual_seed(0)
    query = torch.randn(1, 4, 12, 8)
    key, value = torch.randn(2, 1, kv_heads, 12, 8)
    segments = attention.Segments([0, 5, 6, 12])
    scores = attention.Scores(1 / math.sqrt(8), window=window)
    one_by_one = segments.attend(query, key, value, scores)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: stand_in)
    monkeypatch.setattr(attention, "varlen_usable", lambda _: True)
    at_once = segments.attend(query, key, value, scores)
    torch.testing.assert_close(at_once, one_by_one)


def test_this_torch_has_the_kernel_but_it_is_not_used_on_a_cpu_or_in_fp32():
    assert attention.varlen_kernel() is not None
    assert not attention.varlen_usable(torch.zeros(1, dtype=torch.bfloat16))
    assert not attention.varlen_usable(torch.zeros(1))


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "usable"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float16, 256, (8, 0), True),
        (torch.float32, 128, (9, 0), False),
        (torch.bfloat16, 100, (9, 0), False),  # not a multiple of 8
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 128, (7, 5), False),  # FlashAttention 2 needs Ampere
    ],
)
def test_the_kernel_is_used_where_flash_attention_computes(monkeypatch, dtype, size, capability, usable):
    query = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 4, 12, size), device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert attention.varlen_usable(query) is usable


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_equals_the_attention_by_sequence(monkeypatch, window):
    torch.manual_seed(0)
    made = [torch.randn(1, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    segments, results = attention.Segments([0, 100, 101, 300]), []
    for usable in (True, False):
        monkeypatch.setattr(attention, "varlen_usable", lambda _, usable=usable: usable)
        query, key, value = (part.clone().requires_grad_() for part in made)
        output = segments.attend(query, key, value, attention.Scores(0.125, window=window))
        output.float().square().sum().backward()
        results.append((output, query.grad, key.grad, value.grad))
    for at_once, one_by_one in zip(*results, strict=True):
        torch.testing.assert_close(at_once, one_by_one, rtol=2e-2, atol=2e-2)
