"""The k most likely tokens, compared with sorting all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.errors import BatchError
from rlframework.policy.head import logprobs as logprobs_module
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.head.request import HeadRequest, read_head_output
from rlframework.policy.head.top_k import top_logits


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 9),
    vocabulary=st.integers(2, 11),
    rows=st.integers(1, 10),
    k=st.integers(1, 11),
    temperature=st.sampled_from([1.0, 0.7]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_top_k_matches_sorting_all_logits(count, vocabulary, rows, k, temperature, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(count, 5, generator=generator), torch.randn(vocabulary, 5, generator=generator)
    bias = torch.randn(vocabulary, generator=generator) if with_bias else None
    k = min(k, vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "CHUNK_ELEMENTS", rows * vocabulary)
        values = top_logits(hidden, weight, bias, None, k, temperature)
    found = read_head_output(values, HeadRequest(frozenset({"topk"}), temperature, k))
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    for token in range(count):
        order = sorted(range(vocabulary), key=lambda index: -float(logits[token, index]))[:k]
        assert found.topk_indices[token].tolist() == order
        torch.testing.assert_close(found.topk_logits[token], logits[token, order])
    assert found.topk_indices.dtype == torch.int64


def test_k_above_the_vocabulary_is_an_error():
    with pytest.raises(BatchError, match="k is 4, but the model has 3 tokens"):
        top_logits(torch.zeros(1, 2), torch.zeros(3, 2), None, None, 4, 1.0)


def test_a_patched_model_returns_top_k_at_the_requested_positions():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)).eval()
    ids, positions = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([0, 3])
    request = HeadRequest(frozenset({"topk"}), 1.0, 2)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits[0, positions]
        with HeadPatch(model).computing(request, positions, torch.tensor([1, 5])):
            found = read_head_output(model(input_ids=ids, use_cache=False).logits, request)
    for row in range(2):
        order = sorted(range(11), key=lambda index: -float(plain[row, index]))[:2]
        assert found.topk_indices[row].tolist() == order
        torch.testing.assert_close(found.topk_logits[row], plain[row, order])
