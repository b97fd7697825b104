"""Attention from all scores: by blocks of queries it is the same, and its memory does not grow with their number."""

from __future__ import annotations

import pytest
import torch
from counting_memory import LiveBytes

from rlframework.models import varlen
from rlframework.models.attention import Segments
from rlframework.models.varlen import Scores, unfused

GIB = 1 << 30
HEADS, KV_HEADS, WIDTH = 16, 8, 256  # of Gemma 2 9B


@pytest.mark.parametrize("queries", [7, 24])
@pytest.mark.parametrize(
    "limits", [{}, {"window": 5}, {"chunk": 5}, {"window": 5, "sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])}]
)
def test_blocks_of_queries_compute_what_all_at_once_do(monkeypatch, limits, queries):
    def computed():
        torch.manual_seed(0)
        made = [torch.randn(2, *sizes, 8, requires_grad=True) for sizes in ((4, queries), (2, 24), (2, 24))]
        output = unfused(*made, Scores(softcap=2.0, **limits))
        return output, *torch.autograd.grad((output * torch.randn(output.shape)).sum(), made)

    at_once = computed()
    monkeypatch.setattr(varlen, "BLOCK_SCORES", 2 * 4 * 24 * 5)
    torch.testing.assert_close(computed(), at_once)


def peak(lengths, **limits):
    """Bytes of the forward and backward of a layer's attention, beside its inputs."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    made = [
        torch.empty(1, heads, bounds[-1], WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    with LiveBytes() as live:
        Segments(bounds).attend(*made, Scores(softcap=50.0, **limits)).sum().backward()
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[16_384], [4096] * 4, [1024] * 16])
def test_a_packed_row_of_16k_tokens_takes_the_bytes_that_the_page_says(lengths):
    """In docs/gpu.md: 1.3 to 1.5 GiB, where all scores of one sequence take 64.5."""
    assert 1.25 * GIB < peak(lengths) < 1.5 * GIB


@pytest.mark.slow
def test_a_window_takes_fewer(monkeypatch):
    assert peak([16_384], window=4096) < 0.6 * GIB
    monkeypatch.setattr(varlen, "BLOCK_SCORES", 1 << 50)
    assert peak([16_384]) == pytest.approx(64.5 * GIB, rel=1e-3)
