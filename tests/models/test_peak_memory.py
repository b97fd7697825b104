"""Peak memory of the forward and backward of a model at real sizes, counted on the meta device.

On a GPU torch's allocator rounds blocks up and keeps freed ones, so that its peak is somewhat above these bytes.
"""

from __future__ import annotations

import pytest
import torch
from counting_memory import LiveBytes
from counting_traffic import Traffic
from meta_model import VOCABULARY, qwen3

from rlframework.models.activation_checkpointing import checkpoint_activations
from rlframework.policy.head import vocabulary as vocabulary_shard
from rlframework.policy.head.logprobs import chunked_logprobs
from rlframework.policy.head.patch import HeadPatch, HeadRequest

TOKENS, HIDDEN, WIDTH, KV_HEADS = 16_384, 4096, 128, 8
LOGITS = 4 * TOKENS * VOCABULARY
LAYER = 2 * HIDDEN * (HIDDEN + KV_HEADS * WIDTH) + 3 * HIDDEN * 3 * HIDDEN + 2 * HIDDEN + 2 * WIDTH
"""Weights of a layer: attention, MLP, norms of the layer and of heads."""


@pytest.fixture(autouse=True)
def chunks_of_a_gpu(monkeypatch):
    for sizes in (vocabulary_shard.CHUNK_ELEMENTS, vocabulary_shard.CHUNK_TOKENS):
        monkeypatch.setitem(sizes, "meta", sizes["cuda"])


def run(layers):
    """Bytes kept between forward and backward, and the peak of both, beside those of the weights."""
    model = qwen3(layers, HIDDEN, HIDDEN // WIDTH, tied=False)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    assert sum(p.numel() for p in model.model.layers.parameters()) == layers * LAYER
    checkpoint_activations(model, "full")
    patch, positions = HeadPatch(model), torch.empty(TOKENS, dtype=torch.long, device="meta")
    with LiveBytes() as live:
        with patch.computing(HeadRequest(), positions, positions):
            values = model(input_ids=ids, use_cache=False).logits
        kept = live.now
        values.mean().backward()
    return kept, live.peak


@pytest.mark.slow
def test_all_logits_never_exist_and_a_checkpointed_layer_keeps_its_input_in_bfloat16():
    """Each layer adds its input to what is kept, and its gradients to the peak; all logits would take 10 GB."""
    (kept, peak), (kept_by_more, peak_of_more) = run(2), run(4)
    assert (kept_by_more - kept) / 2 == 2 * TOKENS * HIDDEN
    assert (peak_of_more - peak) / 2 == pytest.approx(2 * LAYER, rel=1e-3)
    gradients = 2 * (2 * LAYER + 2 * VOCABULARY * HIDDEN)
    assert peak - gradients < LOGITS / 2


def test_the_head_takes_one_chunk_and_its_gradients():
    """The logits in fp32 and their gradient in bfloat16, and the fp32 sum of the hidden states' gradient."""
    hidden, weight = (
        torch.empty(count, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for count in (TOKENS, VOCABULARY)
    )
    targets = torch.empty(TOKENS, dtype=torch.long, device="meta")
    with LiveBytes() as live:
        chunked_logprobs(hidden, weight, None, targets)[0].sum().backward()
    chunk, gradients = 1 << 28, 2 * HIDDEN * (TOKENS + VOCABULARY)
    assert live.peak == pytest.approx((4 + 2) * chunk + gradients + 4 * TOKENS * HIDDEN, rel=1e-2)


@pytest.mark.slow
def test_a_layer_of_qwen3_0_6b_keeps_and_moves_what_the_estimate_of_a_step_says():
    """In docs/gpu.md, by token and hidden size: 70 bytes kept; 946 moved by elementwise operations, 15.9 GB in all.

    They depend on the code of transformers, so the tolerance is a tenth.
    """
    kept, moved = [], []
    for layers in (2, 4):
        ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
        model = qwen3(layers, 1024, 16, tied=True)
        with LiveBytes() as live:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            kept.append(live.now)
        del hidden
        with Traffic(lambda _: "all") as traffic:
            model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
        # less what the products of a layer read and write: three for each weight
        moved.append(traffic.bytes["all"] - layers * 2.31e9)
    assert (kept[1] - kept[0]) / 2 == pytest.approx(70 * TOKENS * 1024, rel=0.1)
    assert (moved[1] - moved[0]) / 2 == pytest.approx(15.9e9, rel=0.1)
