"""Bytes that the head moves on a GPU, counted on the meta device at real sizes."""

from __future__ import annotations

import pytest
import torch
from counting_traffic import Traffic
from packaging.version import Version

from rlframework.policy.head import vocabulary as vocabulary_shard
from rlframework.policy.head.logprobs import chunked_logprobs

TOKENS, VOCABULARY, CHUNK = 16_384, 151_936, 1 << 28

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="older torch cannot run addmm(out_dtype=...) on meta tensors"
)


@pytest.fixture(autouse=True)
def chunks_of_a_gpu(monkeypatch):
    for sizes in (vocabulary_shard.CHUNK_ELEMENTS, vocabulary_shard.CHUNK_TOKENS):
        monkeypatch.setitem(sizes, "meta", sizes["cuda"])


def traffic(hidden_size, tokens=TOKENS):
    """Bytes and passes of a forward and backward in bfloat16, uncompiled, by "logits", "tokens" and "others"."""

    def kind(tensor):
        if tensor.dim() == 2 and tensor.numel() > 100 * tokens:
            return "others" if hidden_size in tensor.shape else "logits"
        return "tokens"

    hidden, weight = (
        torch.empty(count, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for count in (tokens, VOCABULARY)
    )
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Traffic(kind) as counted:
        chunked_logprobs(hidden, weight, None, targets)[0].sum().backward()
    return counted


@pytest.mark.parametrize("hidden_size", [1024, 4096])
def test_weight_and_hidden_states_are_moved_as_seldom_as_calculated(hidden_size):
    """Bytes that matrix products move beside the logits; on an H100 at 3.35 TB/s, 1.1 ms and 4.3 ms.

    16,384 tokens take ten parts of the vocabulary. In bfloat16 each part of the weight is read for the logits, for them
    again, and for the gradient of the hidden states, and its gradient is written. Each part of the vocabulary reads the
    hidden states for its logits, for them again, and for the gradient of the weight, and writes and (but for the first)
    reads the fp32 sum of their gradient, which is then read and written in bfloat16.

    The bound is 1.5 times one read of hidden states and weight and one write of their gradients per 2**28 logits.
    """
    found = traffic(hidden_size).bytes["others"]
    parts = 10
    weight, hidden = VOCABULARY * hidden_size, TOKENS * hidden_size
    assert found == (3 * 2 + 2) * weight + (3 * 2 * parts + 4 * (2 * parts - 1) + 4 + 2) * hidden
    floor = 4 * hidden + TOKENS * VOCABULARY / CHUNK * 4 * weight
    assert found <= 1.5 * floor


def test_uncompiled_each_logit_is_passed_over_thirteen_times():
    """46 bytes a logit. Compiled, as on a GPU, the operations between two products are one kernel each: about 22 bytes.

    Forward: written by the product, read by logsumexp. Backward: written by the product, read and written by three
    operations in place, read and written (2 bytes) by the conversion, read by two products (2 bytes).
    """
    counted = traffic(1024)
    assert counted.passes["logits"] == 10 * (2 + 1 + 3 * 2 + 2 + 2)
    assert counted.bytes["logits"] == pytest.approx((4 + 4 + 4 + 3 * 8 + 4 + 2 + 2 * 2) * TOKENS * VOCABULARY, rel=1e-3)


@pytest.mark.parametrize("tokens", [0, 1, 1766, 1767, 5000, 16_384, 100_000])
def test_chunks_of_a_gpu_cover_everything_once_and_are_within_the_limit(tokens):
    """Rows of logits begin at multiples of 128 elements, as tensor cores want them."""
    rows, columns = vocabulary_shard.chunk_shape(tokens, VOCABULARY, torch.device("meta"))
    assert rows * columns <= CHUNK
    assert columns % 128 == 0
    hidden, weight = (torch.empty(count, 8, device="meta") for count in (tokens, VOCABULARY))
    made = vocabulary_shard.Chunks.of(hidden, weight, 0, whole=True)
    for size, slices in ((VOCABULARY, made.parts), (tokens, made.rows)):
        assert [index for one in slices for index in range(one.start, one.stop)] == list(range(size))
