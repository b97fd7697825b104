"""The chunked head against the plain formula and sorted logits, and the patch that puts it into a model's forward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.errors import BatchError, NotSupported
from rlframework.policy.head import logprobs as logprobs_module
from rlframework.policy.head.logprobs import chunked_logprobs, top_logits
from rlframework.policy.head.patch import HeadPatch, require_plain_head
from rlframework.policy.head.request import HeadRequest, read_head_output


def plain(hidden, weight, bias, targets, temperature):
    """The textbook formula, in float64."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    chosen = probabilities[torch.arange(len(targets)), targets]
    return chosen.log(), -(probabilities * probabilities.log()).sum(-1)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 9),
    vocabulary=st.integers(2, 11),
    rows=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.7, 1.6]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_match_the_formula(count, vocabulary, rows, temperature, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 5, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 5, generator=generator, requires_grad=True)
    bias = torch.randn(vocabulary, generator=generator, requires_grad=True) if with_bias else None
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    upstream = torch.randn(count, generator=generator)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]

    with pytest.MonkeyPatch.context() as patch:  # so that `rows` of them make a chunk, and most examples take several
        patch.setattr(logprobs_module, "CHUNK_ELEMENTS", rows * vocabulary)
        logprobs, entropy = chunked_logprobs(hidden, weight, bias, targets, temperature=temperature, wants_entropy=True)
        gradients = torch.autograd.grad((logprobs * upstream).sum(), leaves)

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, expected_entropy = plain(doubles[0], doubles[1], doubles[2] if with_bias else None, targets, temperature)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), doubles)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_uniform_distribution_by_hand():
    hidden, weight = torch.zeros(3, 2), torch.ones(8, 2)
    logprobs, entropy = chunked_logprobs(hidden, weight, None, torch.tensor([0, 3, 7]), wants_entropy=True)
    torch.testing.assert_close(logprobs, torch.full((3,), -2.0794415))  # -ln 8
    torch.testing.assert_close(entropy, torch.full((3,), 2.0794415))


def test_no_chunk_holds_more_logits_than_the_limit(monkeypatch):
    seen = []
    ordinary = torch.nn.functional.linear

    def watching(*arguments):
        result = ordinary(*arguments)
        seen.append(result.numel())
        return result

    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", 40)
    monkeypatch.setattr(torch.nn.functional, "linear", watching)
    hidden = torch.randn(33, 4, requires_grad=True)
    logprobs, _ = chunked_logprobs(hidden, torch.randn(10, 4), None, torch.zeros(33, dtype=torch.long))
    logprobs.sum().backward()
    assert len(seen) == 18  # nine chunks of four rows, forward and backward
    assert max(seen) <= 40


class TinyModel(torch.nn.Module):
    """The parts of a transformers model that `HeadPatch` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(3, 5, bias=False)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden):
        return self.lm_head(hidden)


def test_patched_head_returns_columns_inside_and_logits_outside():
    model = TinyModel()
    hidden = torch.randn(2, 4, 3)
    ordinary = model(hidden)
    patch = HeadPatch(model)
    torch.testing.assert_close(model(hidden), ordinary)
    request = HeadRequest(frozenset({"logprobs", "entropy"}))
    with patch.computing(request, torch.tensor([1, 6]), torch.tensor([4, 0])):
        output = read_head_output(model(hidden), request)
    expected = ordinary.reshape(8, 5)[[1, 6]].log_softmax(-1)
    torch.testing.assert_close(output.logprobs, expected[[0, 1], [4, 0]])
    torch.testing.assert_close(output.entropy, -(expected.exp() * expected).sum(-1))
    assert not output.entropy.requires_grad
    torch.testing.assert_close(model(hidden), ordinary)


def test_patched_head_is_restored_after_an_error():
    model = TinyModel()
    patch = HeadPatch(model)
    hidden = torch.randn(1, 2, 3)
    with (
        pytest.raises(RuntimeError, match="boom"),
        patch.computing(HeadRequest(), torch.tensor([0]), torch.tensor([1])),
    ):
        raise RuntimeError("boom")
    assert model(hidden).shape == (1, 2, 5)


def test_logits_on_request_at_the_temperature():
    model = TinyModel()
    patch, hidden = HeadPatch(model), torch.randn(1, 3, 3)
    ordinary = model(hidden)
    request = HeadRequest(frozenset({"logits"}), temperature=2.0)
    with patch.computing(request, torch.tensor([2]), torch.tensor([0])):
        output = read_head_output(model(hidden), request)
    torch.testing.assert_close(output.logits, ordinary[0, 2:] / 2.0)


@pytest.mark.parametrize("wanted", ["logprobs", "logits", "topk", "scores"])
def test_logits_from_outside_the_context_are_rejected(wanted):
    model = TinyModel()
    HeadPatch(model)
    with pytest.raises(RuntimeError, match=r"\[2, 4, 5\].*ran outside HeadPatch\.computing"):
        read_head_output(model(torch.randn(2, 4, 3)), HeadRequest(frozenset({wanted}), top_k=2))


def test_a_model_that_changes_its_logits_is_rejected():
    from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

    small = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with pytest.raises(NotSupported, match="Gemma2ForCausalLM changes its logits after the output head"):
        require_plain_head(Gemma2ForCausalLM(Gemma2Config(**small, **heads, final_logit_softcapping=2.0)))
    with pytest.raises(NotSupported, match="GraniteForCausalLM"):
        require_plain_head(GraniteForCausalLM(GraniteConfig(**small, **heads, logits_scaling=4.0)))
    require_plain_head(LlamaForCausalLM(LlamaForCausalLM.config_class(**small, **heads)))


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
