"""Attention in one kernel call: its arguments, tested with a stand-in that follows torch's documentation."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rlframework.models import attention, forward, varlen
from rlframework.models.varlen import PLAIN, Scores

SCALE = 1 / math.sqrt(8)


def stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False, return_aux=None
):
    """`varlen_attn` as documented, for `[T, heads, D]`, one query at a time; the last query sees the last key."""
    assert key.shape == value.shape
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert len(cu_seq_q) == len(cu_seq_k)
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_k[-1]) == len(key)
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(cu_seq_k.diff().max())
    left, right = window_size
    assert right == 0
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or enable_gqa
    outputs, logsumexps = [], []
    for at, keys in visible(cu_seq_q, cu_seq_k, left):
        k, v = (part[keys].repeat_interleave(groups, 1) for part in (key, value))
        products = torch.einsum("khd,hd->kh", k, query[at]) * scale
        outputs.append(torch.einsum("kh,khd->hd", torch.softmax(products, 0), v))
        logsumexps.append(products.logsumexp(0))
    # as torch's, which ignores the gradient of the logsumexp
    return torch.stack(outputs) if return_aux is None else (torch.stack(outputs), torch.stack(logsumexps, 1).detach())


def visible(cu_seq_q, cu_seq_k, left):
    """Each query and the keys that it sees."""
    for (start, end), (first_key, end_key) in zip(
        pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True
    ):
        assert (start < end) == (
            first_key < end_key
        )  # no keys without queries, whose gradient the kernel might not write
        for at in range(start, end):
            last = end_key - (end - at) + 1
            yield at, slice(first_key if left < 0 else max(first_key, last - 1 - left), last)


def stand_in_backward(grad, query, key, value, output, logsumexp, lengths, scale, window):
    """FlashAttention's backward (Dao et al. 2022, arXiv:2205.14135, algorithm 4): from output and logsumexp."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(groups, 1) for part in (key, value))
    of_query, of_key, of_value = (torch.zeros_like(part) for part in (query, keys, values))
    for at, seen in visible(*lengths[:2], window[0]):
        p = torch.exp(torch.einsum("khd,hd->kh", keys[seen], query[at]) * scale - logsumexp[:, at])
        of_value[seen] += torch.einsum("kh,hd->khd", p, grad[at])
        of_p = torch.einsum("khd,hd->kh", values[seen], grad[at])
        of_product = p * (of_p - (grad[at] * output[at]).sum(-1)) * scale
        of_query[at] = torch.einsum("kh,khd->hd", of_product, keys[seen])
        of_key[seen] += torch.einsum("kh,hd->khd", of_product, query[at])
    return of_query, *(part.unflatten(1, (-1, groups)).sum(2) for part in (of_key, of_value))


@pytest.fixture
def kernel_calls(monkeypatch):
    """The kernel is used, and does what it says; returns the shapes of its calls."""
    shapes = []

    def called(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False, **more):
        shapes.append((len(query), len(key), len(cu_seq_q), len(cu_seq_k), max_q, max_k))
        options = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa, **more}
        return stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    monkeypatch.setattr(varlen, "varlen_kernel", lambda: called)
    monkeypatch.setattr(varlen, "kernel_backward", stand_in_backward)
    monkeypatch.setattr(varlen, "kernel_for_packed_rows", lambda *_, **__: True)
    monkeypatch.setattr(varlen, "HALF", (torch.float32,))
    return shapes


LAYOUTS = {
    "packed": (attention.Segments([0, 5, 6, 12]), 1),
    "padded": (attention.PaddedRows(), 2),
}


def with_gradients(layout, rows, kv_heads, scores, value_size=8):
    """The output of the attention and the gradients of all its inputs, of sinks if there are any."""
    torch.manual_seed(0)
    sizes = {"query": (4, 8), "key": (kv_heads, 8), "value": (kv_heads, value_size)}
    made = [torch.randn(rows, heads, 12, size, requires_grad=True) for heads, size in sizes.values()]
    if scores.sinks is not None:
        scores = scores._replace(sinks=scores.sinks.clone().requires_grad_())
        made.append(scores.sinks)
    output = layout.attend(*made[:3], scores)
    loss = (output * torch.randn(output.shape)).sum()
    return output, *torch.autograd.grad(loss, made)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("sinks", [None, (0.5, -2.0, 3.0, 0.0)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_computes_what_all_scores_would_give(request, layout, sinks, kv_heads, window):
    scores = Scores(SCALE, window=window, sinks=None if sinks is None else torch.tensor(sinks))
    expected = with_gradients(*LAYOUTS[layout], kv_heads, scores)
    calls = request.getfixturevalue("kernel_calls")
    found = with_gradients(*LAYOUTS[layout], kv_heads, scores)
    torch.testing.assert_close(found, expected)
    assert len(calls) == (layout == "packed" or sinks is not None or window is not None)  # SDPA computes the others


def test_the_kernel_computes_values_that_are_smaller_than_keys(request):
    expected = with_gradients(*LAYOUTS["packed"], 2, Scores(SCALE), value_size=4)
    calls = request.getfixturevalue("kernel_calls")
    torch.testing.assert_close(with_gradients(*LAYOUTS["packed"], 2, Scores(SCALE), value_size=4), expected)
    assert len(calls) == 1


def test_the_kernel_computes_chunks_as_sequences_and_leaves_soft_caps(request):
    scores = Scores(SCALE, chunk=4)
    expected = with_gradients(*LAYOUTS["packed"], 2, scores)
    calls = request.getfixturevalue("kernel_calls")
    torch.testing.assert_close(with_gradients(*LAYOUTS["packed"], 2, scores), expected)
    assert len(calls) == 1
    with_gradients(*LAYOUTS["packed"], 2, Scores(SCALE, softcap=2.0, sinks=torch.zeros(4)))
    assert len(calls) == 1


def test_the_kernel_sees_few_different_numbers_of_sequences_and_lengths(monkeypatch):
    seen, numbers = set(), random.Random(0)

    def called(query, key, value, cu_seq_q, cu_seq_k, *longest, **options):
        seen.add((len(cu_seq_q), len(cu_seq_k), *longest))
        return query

    monkeypatch.setattr(varlen, "varlen_kernel", lambda: called)
    monkeypatch.setattr(attention, "varlen_usable", lambda *_: True)
    for _ in range(500):
        bounds = [0, *sorted(numbers.sample(range(1, 2048), numbers.randint(0, 60))), 2048]
        row = torch.zeros(1, 1, 2048, 1)
        attention.Segments(bounds).attend(row, row, row)
    counts, lengths = {17, 33, 65}, {128, 256, 512, 1024, 2048}
    assert {shape[0] for shape in seen} == counts
    assert all(shape[0] == shape[1] and shape[2] == shape[3] and shape[2] in lengths for shape in seen)


@pytest.mark.parametrize(
    "limits", [{}, {"window": 3}, {"chunk": 4}, {"window": 3, "sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])}]
)
@pytest.mark.parametrize(
    ("size", "bounds", "rows"),
    [(2, [0, 3, 4, 11, 24], 1), (3, [0, 24], 2), (2, [0, 2, 4, 6, 8, 10, 13, 24], 1), (1, [0, 20, 24], 1)],
)
def test_a_context_shard_attends_in_a_call_per_chunk(request, monkeypatch, size, bounds, rows, limits):
    torch.manual_seed(0)
    whole = {name: torch.randn(rows, heads, 24, 8) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    scores = Scores(SCALE, **limits)
    gathered = torch.cat((whole["key"], whole["value"]), -1).requires_grad_()
    monkeypatch.setattr(forward._GatherSequence, "apply", lambda local, shard: gathered)

    def attend(rank):
        chunks = forward.ranges(24, rank, size)
        columns = torch.cat([torch.arange(*chunk) for chunk in chunks])
        shard = forward.ContextShard(size, columns, None, chunks, bounds)
        output = shard.attend(*(tensor[:, :, columns] for tensor in whole.values()), scores)
        (gradient,) = torch.autograd.grad(output.square().sum(), gathered)
        return output, gradient

    by_block = [attend(rank) for rank in range(size)]
    calls = request.getfixturevalue("kernel_calls")
    for rank, (output, gradient) in enumerate(by_block):
        calls.clear()
        found = attend(rank)
        assert len(calls) == len(forward.ranges(24, rank, size)) <= 2
        torch.testing.assert_close(found[0], output)
        torch.testing.assert_close(found[1], gradient)


def test_this_torch_has_the_kernel_but_it_is_not_used_on_a_cpu_or_in_fp32():
    assert varlen.varlen_kernel() is not None
    assert not varlen.varlen_usable(torch.zeros(1, dtype=torch.bfloat16), PLAIN)
    assert not varlen.varlen_usable(torch.zeros(1), PLAIN)


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
    query = SimpleNamespace(dtype=dtype, shape=(1, 4, 12, size), device=torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert varlen.varlen_usable(query, PLAIN) is usable


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("limits", [{}, {"window": 3}, {"sinks": 0.5}, {"window": 3, "sinks": -1.0}])
def test_the_kernel_equals_the_attention_by_sequence(monkeypatch, limits):
    torch.manual_seed(0)
    made = [torch.randn(1, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    if "sinks" in limits:
        made.append(torch.randn(4, device="cuda", dtype=torch.bfloat16) + limits["sinks"])
    segments, results = attention.Segments([0, 100, 101, 300]), []
    for usable in (True, False):
        monkeypatch.setattr(attention, "varlen_usable", lambda *_, usable=usable: usable)
        query, key, value, *sinks = given = [part.clone().requires_grad_() for part in made]
        scores = Scores(0.125, window=limits.get("window"), sinks=sinks[0] if sinks else None)
        output = segments.attend(query, key, value, scores)
        output.float().square().sum().backward()
        results.append((output, *(part.grad for part in given)))
    for at_once, one_by_one in zip(*results, strict=True):
        torch.testing.assert_close(at_once, one_by_one, rtol=2e-2, atol=2e-2 * float(one_by_one.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("bounds", [[0, 100, 101, 400], [0, 400]])
def test_the_kernel_equals_the_attention_by_query_block(monkeypatch, bounds, window):
    torch.manual_seed(0)
    made = [torch.randn(1, heads, 400, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    chunks = forward.ranges(400, 0, 2)
    columns = torch.cat([torch.arange(*chunk) for chunk in chunks]).cuda()
    shard, results = forward.ContextShard(2, columns, None, chunks, bounds), []
    for usable in (True, False):
        monkeypatch.setattr(forward, "varlen_usable", lambda *_, usable=usable: usable)
        query, key, value = (part.clone().requires_grad_() for part in made)
        gathered = torch.cat((key, value), -1)
        monkeypatch.setattr(forward._GatherSequence, "apply", lambda local, shard, gathered=gathered: gathered)
        scores = Scores(0.125, window=window)
        output = shard.attend(query[:, :, columns], key[:, :, columns], value[:, :, columns], scores)
        output.float().square().sum().backward()
        results.append((output, query.grad, key.grad, value.grad))
    for by_chunk, by_block in zip(*results, strict=True):
        torch.testing.assert_close(by_chunk, by_block, rtol=2e-2, atol=2e-2)
