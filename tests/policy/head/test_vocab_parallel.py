"""The vocabulary-parallel head against the plain formula over the whole vocabulary.

The ranks are threads of this process, as in torch's own distributed tests.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from rlframework.policy.head import logprobs as logprobs_module
from rlframework.policy.head.logprobs import chunked_logprobs, whole_logits
from rlframework.policy.head.vocab_parallel import VocabularyShard


def on_ranks(ranks, work):
    """Return the results of `work(rank)` in `ranks` threads that are the ranks of the default group."""
    results, errors = {}, []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()

    def run(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]


def plain(hidden, weight, bias, targets, temperature):
    """The textbook formula, in float64."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return probabilities[torch.arange(len(targets)), targets].log(), -(probabilities * probabilities.log()).sum(-1)


def leaves_of(rank, bounds, padding, hidden, weight, bias):
    """This rank's leaves: the hidden states and its rows, followed by rows that only pad the vocabulary."""
    rows = slice(bounds[rank], bounds[rank + 1])
    below = torch.full((padding, weight.shape[1]), 9.0)  # would win every softmax
    own = [hidden, torch.cat((weight[rows], below))]
    own += [] if bias is None else [torch.cat((bias[rows], torch.full((padding,), 9.0)))]
    return [leaf.clone().requires_grad_() for leaf in own]


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(0, 9),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    padding=st.integers(0, 2),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.7, 1.6]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_match_the_whole_vocabulary(count, sizes, padding, chunk, temperature, with_bias, seed):
    bounds = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(count, 5, generator=generator), torch.randn(bounds[-1], 5, generator=generator)
    bias = torch.randn(bounds[-1], generator=generator) if with_bias else None
    targets = torch.randint(0, bounds[-1], (count,), generator=generator)
    upstream = torch.randn(count, generator=generator)

    def work(rank):
        leaves = leaves_of(rank, bounds, padding, hidden, weight, bias)
        shard = VocabularyShard(dist.group.WORLD, bounds[rank], sizes[rank])
        own_bias = leaves[2] if with_bias else None
        logprobs, entropy = chunked_logprobs(
            leaves[0], leaves[1], own_bias, targets, shard, temperature=temperature, wants_entropy=True
        )
        return logprobs, entropy, torch.autograd.grad((logprobs * upstream).sum(), leaves)

    with pytest.MonkeyPatch.context() as patch:  # so that `chunk` of them, or fewer, make a chunk
        patch.setattr(logprobs_module, "CHUNK_ELEMENTS", chunk * max(sizes))
        found = on_ranks(len(sizes), work)

    doubles = [leaf.double().requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    expected, expected_entropy = plain(doubles[0], doubles[1], doubles[2] if with_bias else None, targets, temperature)
    wanted = torch.autograd.grad((expected * upstream).sum(), doubles)
    for rank, (logprobs, entropy, gradients) in enumerate(found):
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[0].double(), wanted[0], rtol=1e-4, atol=1e-5)
        for gradient, whole in zip(gradients[1:], wanted[1:], strict=True):
            rows = whole[bounds[rank] : bounds[rank + 1]]
            padded = torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:])))
            torch.testing.assert_close(gradient.double(), padded, rtol=1e-4, atol=1e-5)


def test_whole_logits_are_gathered_and_their_gradient_sharded():
    hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    upstream = torch.tensor([[1.0, 10.0, 100.0]])

    def work(rank):
        own = hidden.clone().requires_grad_(), weight[[0, 1] if rank == 0 else [2]].clone().requires_grad_()
        shard = VocabularyShard(dist.group.WORLD, (0, 2)[rank], (2, 1)[rank])
        logits = whole_logits(*own, None, shard, temperature=0.5)
        return logits, torch.autograd.grad((logits * upstream).sum(), own)

    for rank, (logits, (of_hidden, of_weight)) in enumerate(on_ranks(2, work)):
        assert logits.tolist() == [[2.0, 4.0, 6.0]]  # (1, 2, 3) / 0.5
        assert of_hidden.tolist() == [[202.0, 220.0]]  # 2 * (1 * w0 + 10 * w1 + 100 * w2)
        assert of_weight.tolist() == [[[2.0, 4.0], [20.0, 40.0]], [[200.0, 400.0]]][rank]  # 2 * upstream * hidden
