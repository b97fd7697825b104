"""A head sharded over the vocabulary, by ranks that are threads of this process."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from head_formula import limit_chunks, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from rlframework.policy.head.logprobs import chunked_logprobs, whole_logits
from rlframework.policy.head.patch import HeadPatch, HeadRequest, read_head_output
from rlframework.policy.head.vocabulary import VocabularyShard


def on_ranks(ranks, work):
    """Return the results of `work(rank)` in `ranks` threads that are the ranks of the default group."""
    results, errors = {}, []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # missing in torch 2.11, whose destroy_process_group reads it
        threaded.ThreadLocalWorld.comms = property(lambda _: [])
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
    most=st.sampled_from([None, 1, 4, 9]),
    temperature=st.sampled_from([1.0, 0.7, 1.6]),
    softcap=st.sampled_from([None, 2.5]),
    with_bias=st.booleans(),
    several=st.sampled_from([(), (1,), (3,)]),
    of_entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_match_the_whole_vocabulary(
    count, sizes, padding, chunk, most, temperature, softcap, with_bias, several, of_entropy, seed
):
    bounds = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(count, 5, generator=generator), torch.randn(bounds[-1], 5, generator=generator)
    bias = torch.randn(bounds[-1], generator=generator) if with_bias else None
    targets = torch.randint(0, bounds[-1], (count, *several), generator=generator)
    upstream, entropy_upstream = (torch.randn(count, *each, generator=generator) for each in (several, ()))

    def work(rank):
        leaves = leaves_of(rank, bounds, padding, hidden, weight, bias)
        shard = VocabularyShard(dist.group.WORLD, bounds[rank], sizes[rank])
        own_bias = leaves[2] if with_bias else None
        keys = {"temperature": temperature, "softcap": softcap, "wants_entropy": True, "entropy_gradient": of_entropy}
        logprobs, entropy = chunked_logprobs(leaves[0], leaves[1], own_bias, targets, shard, **keys)
        total = (logprobs * upstream).sum() + of_entropy * (entropy * entropy_upstream).sum()
        return logprobs, entropy, torch.autograd.grad(total, leaves)

    with pytest.MonkeyPatch.context() as patch:  # so that `chunk` of them, or fewer, make a chunk
        limit_chunks(patch, chunk * max(sizes), most)
        found = on_ranks(len(sizes), work)

    doubles = [leaf.double().requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    own_bias = doubles[2] if with_bias else None
    expected, expected_entropy = plain(doubles[0], doubles[1], own_bias, targets, temperature, softcap)
    total = (expected * upstream).sum() + of_entropy * (expected_entropy * entropy_upstream).sum()
    wanted = torch.autograd.grad(total, doubles)
    for rank, (logprobs, entropy, gradients) in enumerate(found):
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[0].double(), wanted[0], rtol=1e-4, atol=1e-5)
        for gradient, whole in zip(gradients[1:], wanted[1:], strict=True):
            rows = whole[bounds[rank] : bounds[rank + 1]]
            padded = torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:])))
            torch.testing.assert_close(gradient.double(), padded, rtol=1e-4, atol=1e-5)


def test_a_formula_of_logits_holds_for_a_head_that_ranks_share():
    """The model's factor 0.5 and soft cap 2.5 at temperature 0.7: in the most likely tokens and in whole logits."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(6, 5, generator=generator) * 3, torch.randn(7, 5, generator=generator)
    upstream = torch.randn(6, 7, generator=generator)
    bounds = (0, 4, 7)
    config = SimpleNamespace(logit_scale=0.5, final_logit_softcapping=2.5)

    def work(rank):
        own = [each.clone().requires_grad_() for each in (hidden, weight[bounds[rank] : bounds[rank + 1]])]
        head = torch.nn.Linear(5, 1, bias=False)
        model = torch.nn.Module()
        model.config, model.get_output_embeddings = config, lambda: head
        patch = HeadPatch(model, VocabularyShard(dist.group.WORLD, bounds[rank], len(own[1])))
        request = HeadRequest(frozenset({"topk"}), temperature=0.7, top_k=3)
        top = read_head_output(patch.values(request, *own, None, None), request)
        logits = patch.values(HeadRequest(frozenset({"logits"}), temperature=0.7), *own, None, None)
        return top, logits, torch.autograd.grad((logits * upstream).sum(), own)

    whole = [each.double().requires_grad_() for each in (hidden, weight)]
    expected = 2.5 * torch.tanh(0.5 * whole[0] @ whole[1].T / 2.5) / 0.7
    of_hidden, of_weight = torch.autograd.grad((expected * upstream).sum(), whole)
    values, tokens = expected.topk(3)
    for rank, (top, logits, gradients) in enumerate(on_ranks(2, work)):
        torch.testing.assert_close(top.topk_logits.double(), values, rtol=1e-5, atol=1e-5)
        assert top.topk_indices.tolist() == tokens.tolist()
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[0].double(), of_hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            gradients[1].double(), of_weight[bounds[rank] : bounds[rank + 1]], rtol=1e-4, atol=1e-5
        )


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
