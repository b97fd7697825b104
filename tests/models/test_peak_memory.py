"""Peak memory of the forward and backward of a model at real sizes, counted on the meta device.

On a GPU torch's allocator rounds blocks up and keeps freed ones, so that its peak is somewhat above these bytes. The
attention is a stand-in that keeps what a fused kernel keeps: queries, keys, values, outputs and a number per row.
"""

from __future__ import annotations

import pytest
import torch
from counting_memory import LiveBytes
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from rlframework.models.loading import checkpoint_activations
from rlframework.policy.head import chunks
from rlframework.policy.head.logprobs import chunked_logprobs
from rlframework.policy.head.patch import HeadPatch, HeadRequest

TOKENS, HIDDEN, VOCABULARY, WIDTH, KV_HEADS = 16_384, 4096, 151_936, 128, 8
LOGITS = 4 * TOKENS * VOCABULARY
LAYER = 2 * HIDDEN * (HIDDEN + KV_HEADS * WIDTH) + 3 * HIDDEN * 3 * HIDDEN + 2 * HIDDEN + 2 * WIDTH
"""Weights of a layer: attention, MLP, norms of the layer and of heads."""


class FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@pytest.fixture(autouse=True)
def chunks_of_a_gpu(monkeypatch):
    for sizes in (chunks.CHUNK_ELEMENTS, chunks.CHUNK_TOKENS):
        monkeypatch.setitem(sizes, "meta", sizes["cuda"])


def run(layers):
    """Bytes kept between forward and backward, and the peak of both, beside those of the weights."""
    AttentionInterface.register("stand_in", lambda module, q, k, v, *_, **__: (FusedAttention.apply(q, k, v), None))
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // WIDTH,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        attn_implementation="stand_in",
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    assert sum(p.numel() for p in model.model.layers.parameters()) == layers * LAYER
    checkpoint_activations(model)
    patch, positions = HeadPatch(model), torch.empty(TOKENS, dtype=torch.long, device="meta")
    with LiveBytes() as live:
        with patch.computing(HeadRequest(), positions, positions):
            values = model(input_ids=ids, use_cache=False).logits
        kept = live.now
        values.mean().backward()
    return kept, live.peak


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
