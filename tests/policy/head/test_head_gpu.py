"""The head on a GPU at real widths: its error against fp64, its memory and its rate. Tiny sizes run on a CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from rlframework.policy.head import vocabulary as vocabulary_shard
from rlframework.policy.head.logprobs import chunked_logprobs

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCABULARY = 151_936


@dataclass
class Head:
    """Inputs of the head with logits of standard deviation 1, and the gradient of the log-probabilities."""

    tokens: int
    vocabulary: int
    hidden_size: int
    device: str

    def __post_init__(self):
        generator = torch.Generator(self.device).manual_seed(0)

        def drawn(*shape):
            return torch.randn(*shape, device=self.device, generator=generator)

        scale = self.hidden_size**-0.25
        self.hidden = (drawn(self.tokens, self.hidden_size) * scale).bfloat16().requires_grad_()
        self.weight = (drawn(self.vocabulary, self.hidden_size) * scale).bfloat16().requires_grad_()
        self.targets = torch.randint(self.vocabulary, (self.tokens,), device=self.device, generator=generator)
        self.upstream = drawn(self.tokens)

    def run(self):
        """Log-probabilities, entropies, and the gradients of hidden states and weight."""
        logprobs, entropies = chunked_logprobs(self.hidden, self.weight, None, self.targets, wants_entropy=True)
        grads = torch.autograd.grad(logprobs, (self.hidden, self.weight), self.upstream)
        return logprobs.detach(), entropies, *grads

    @torch.no_grad()
    def exact(self, tokens, ids):
        """The same in fp64: for the first `tokens`, and of the weight's gradient the first `ids` rows."""
        results = []
        for start in range(0, self.tokens, 256):
            rows = slice(start, start + 256)
            hidden = self.hidden[rows].double()
            logprobs = (hidden @ self.weight.double().T).log_softmax(-1)
            slope = -logprobs.exp()
            slope.scatter_add_(1, self.targets[rows, None], torch.ones_like(slope[:, :1]))
            slope *= self.upstream[rows, None]
            results.append(
                (
                    logprobs.gather(1, self.targets[rows, None])[:, 0],
                    -(logprobs.exp() * logprobs).sum(-1),
                    slope @ self.weight.double() if start < tokens else None,
                    slope[:, :ids].T @ hidden,
                )
            )
        logprobs, entropies, of_hidden, of_weight = zip(*results, strict=True)
        first = torch.cat([part for part in of_hidden if part is not None])
        return torch.cat(logprobs), torch.cat(entropies), first[:tokens], torch.stack(of_weight).sum(0)


@pytest.mark.parametrize(
    ("device", "tokens", "vocabulary", "hidden_size"),
    [("cpu", 40, 500, 64), pytest.param("cuda", 4096, VOCABULARY, 1024, marks=GPU)],
)
def test_several_chunks_are_as_exact_as_fp32_and_gradients_as_bfloat16(
    device, tokens, vocabulary, hidden_size, monkeypatch
):
    """Logits that were rounded to bfloat16 would be off by up to 4e-3. Gradients are rounded to bfloat16, 8 bits."""
    if device == "cpu":
        monkeypatch.setitem(vocabulary_shard.CHUNK_ELEMENTS, "cpu", 40 * 128)
        monkeypatch.setitem(vocabulary_shard.CHUNK_TOKENS, "cpu", 40)
    head = Head(tokens, vocabulary, hidden_size, device)
    assert len(vocabulary_shard.Chunks.of(head.hidden, head.weight, 0, whole=True).parts) > 1
    logprobs, entropies, of_hidden, of_weight = head.run()
    right = head.exact(tokens=16, ids=64)
    torch.testing.assert_close(logprobs.double(), right[0], rtol=0, atol=5e-5)
    torch.testing.assert_close(entropies.double(), right[1], rtol=0, atol=5e-5)
    for found, exact in ((of_hidden[:16], right[2]), (of_weight[:64], right[3])):
        assert (found - exact).norm() <= 2**-7 * exact.norm()


@pytest.mark.parametrize("hidden_size", [pytest.param(1024, marks=GPU), pytest.param(4096, marks=GPU)])
def test_the_peak_is_that_of_one_chunk_and_its_gradients(hidden_size):
    """As `tests/models/test_peak_memory.py` counts it; cuBLAS has a workspace besides."""
    head = Head(16_384, VOCABULARY, hidden_size, "cuda")
    head.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head.run()
    peak = torch.cuda.max_memory_allocated() - before
    elements = vocabulary_shard.chunk_elements(torch.device("cuda"))
    gradients = 2 * hidden_size * (head.tokens + VOCABULARY)
    assert peak <= 1.05 * ((4 + 2) * elements + gradients + 4 * head.tokens * hidden_size) + 2**27


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "tokens", "vocabulary", "share"),
    [("cpu", 64, 512, 0.0), pytest.param("cuda", 16_384, VOCABULARY, 0.3, marks=GPU)],
)
def test_forward_and_backward_reach_a_share_of_the_rate_of_matrix_products(device, tokens, vocabulary, share):
    """Four products, one of them recomputed. On an H100 moving the logits should take about a third of the time."""
    head = Head(tokens, vocabulary, 1024, device)
    left, right = (torch.randn(min(8192, tokens), 8192, device=device).bfloat16() for _ in range(2))
    rate = 2 * left.shape[0] ** 2 * left.shape[1] / seconds(lambda: left @ right.T)
    assert 4 * 2 * tokens * vocabulary * 1024 / seconds(head.run) >= share * rate


def seconds(run, rounds=5):
    """The least seconds of a call."""

    def once():
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return min([once() for _ in range(rounds + 1)][1:])
