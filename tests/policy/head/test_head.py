"""The chunked head against the plain formula and sorted logits, and the patch that puts it into a model's forward."""

from __future__ import annotations

from shutil import which

import pytest
import torch
import transformers
from head_formula import limit_chunks, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError, NotSupported
from rlframework.policy.head import logprobs as logprobs_module
from rlframework.policy.head import vocabulary as vocabulary_shard
from rlframework.policy.head.logprobs import chunked_logprobs, top_logits
from rlframework.policy.head.patch import HeadPatch, HeadRequest, read_head_output, require_known_formula

COMPILERS = ("c++", "g++", "clang++")


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(0, 9),
    vocabulary=st.integers(2, 11),
    rows=st.integers(1, 10),
    most=st.sampled_from([None, 1, 4, 9]),
    temperature=st.sampled_from([1.0, 0.7, 1.6]),
    softcap=st.sampled_from([None, 2.5]),
    with_bias=st.booleans(),
    several=st.sampled_from([(), (1,), (3,)]),  # targets of a token; equal ones count each
    of_entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_match_the_formula(
    count, vocabulary, rows, most, temperature, softcap, with_bias, several, of_entropy, seed
):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 5, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 5, generator=generator, requires_grad=True)
    bias = torch.randn(vocabulary, generator=generator, requires_grad=True) if with_bias else None
    targets = torch.randint(0, vocabulary, (count, *several), generator=generator)
    upstream, entropy_upstream = (torch.randn(count, *each, generator=generator) for each in (several, ()))
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]

    with pytest.MonkeyPatch.context() as patch:  # so that `rows` of them make a chunk, and most examples take several
        limit_chunks(patch, rows * vocabulary, most)
        keys = {"temperature": temperature, "softcap": softcap}
        logprobs, entropy = chunked_logprobs(
            hidden, weight, bias, targets, **keys, wants_entropy=True, entropy_gradient=of_entropy
        )
        assert entropy.requires_grad == of_entropy
        total = (logprobs * upstream).sum() + of_entropy * (entropy * entropy_upstream).sum()
        gradients = torch.autograd.grad(total, leaves)

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, expected_entropy = plain(*doubles[:2], doubles[2] if with_bias else None, targets, **keys)
    total = (expected * upstream).sum() + of_entropy * (expected_entropy * entropy_upstream).sum()
    expected_gradients = torch.autograd.grad(total, doubles)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    # an entropy is the difference of two numbers as large as the logits, and its error is part of each gradient
    largest = float((doubles[0] @ doubles[1].T).detach().abs().max() / temperature) if count else 0.0
    entropy_error = 5e-6 + 1e-6 * largest
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=entropy_error)
    steepest = float(entropy_upstream.abs().max() / temperature) if count and of_entropy else 0.0
    factor = max(float(leaf.detach().abs().max()) for leaf in leaves if leaf.numel())
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(
            gradient.double(), wanted, rtol=1e-4, atol=1e-5 + entropy_error * steepest * max(factor, 1.0)
        )


def test_no_chunk_holds_more_logits_than_the_limit(monkeypatch):
    seen = []
    ordinary = torch.nn.functional.linear

    def watching(*arguments):
        result = ordinary(*arguments)
        seen.append(result.numel())
        return result

    monkeypatch.setitem(vocabulary_shard.CHUNK_ELEMENTS, "cpu", 40)
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


def test_patched_head_returns_values_inside_and_logits_outside():
    model = TinyModel()
    hidden, positions, targets = torch.randn(2, 4, 3), torch.tensor([1, 6]), torch.tensor([4, 0])
    ordinary = model(hidden)
    patch = HeadPatch(model)
    torch.testing.assert_close(model(hidden), ordinary)
    found = {}
    for wanted in (("logprobs", "entropy"), ("logits",), ("topk",)):
        request = HeadRequest(frozenset(wanted), temperature=2.0, top_k=2)
        with patch.computing(request, positions, targets):
            found |= read_head_output(model(hidden), request).results()
    logits = ordinary.reshape(8, 5)[[1, 6]] / 2.0
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(found["logprobs"], expected[[0, 1], [4, 0]])
    torch.testing.assert_close(found["entropy"], -(expected.exp() * expected).sum(-1))
    assert not found["entropy"].requires_grad
    torch.testing.assert_close(found["logits"], logits)
    torch.testing.assert_close(found["topk_logits"], logits.topk(2).values.detach())
    assert torch.equal(found["topk_indices"], logits.topk(2).indices)
    torch.testing.assert_close(found["topk_normalizers"], logits.logsumexp(-1).detach())
    request = HeadRequest(frozenset({"logprobs", "entropy"}), temperature=2.0, token_sets="sets")
    sets = torch.tensor([[1, 4, 0], [2, 2, 3]])
    with patch.computing(request, positions, torch.cat((targets[:, None], sets), 1)):
        found = read_head_output(model(hidden), request)
    torch.testing.assert_close(found.logprobs, expected[[0, 1], [4, 0]])
    torch.testing.assert_close(found.set_logprobs, expected.gather(1, sets))
    torch.testing.assert_close(found.entropy, -(expected.exp() * expected).sum(-1))
    with pytest.raises(RuntimeError, match="boom"), patch.computing(HeadRequest(), positions, targets):
        raise RuntimeError("boom")
    torch.testing.assert_close(model(hidden), ordinary)


@pytest.mark.parametrize("wanted", ["logprobs", "logits", "topk", "scores"])
def test_logits_from_outside_the_context_are_rejected(wanted):
    model = TinyModel()
    HeadPatch(model)
    with pytest.raises(RuntimeError, match=r"\[2, 4, 5\].*ran outside HeadPatch\.computing"):
        read_head_output(model(torch.randn(2, 4, 3)), HeadRequest(frozenset({wanted}), top_k=2))


SMALL = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {}),
        ("Gemma2", {"final_logit_softcapping": 2.0}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.25}),
    ],
)
def test_a_model_that_changes_its_logits_by_a_known_formula(kind, settings):
    torch.manual_seed(0)
    sizes = {name: size for name, size in SMALL.items() if kind != "Cohere" or name != "head_dim"}
    config = getattr(transformers, f"{kind}Config")(**sizes, **HEADS, **settings, pad_token_id=0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.get_output_embeddings().weight.data.normal_(0, 3)
    require_known_formula(model)
    ids, targets = torch.arange(5)[None], torch.tensor([7, 8, 9])
    expected = model(ids).logits[0, :3]
    patch = HeadPatch(model)
    for wanted in ("logprobs", "logits", "topk"):
        request = HeadRequest(frozenset({wanted}), temperature=2.0, top_k=3)
        with patch.computing(request, torch.arange(3), targets):
            found = read_head_output(model(ids).logits, request)
        if found.logprobs is not None:
            logprobs = (expected / 2).log_softmax(-1)[[0, 1, 2], targets]
            torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
        if found.logits is not None:
            torch.testing.assert_close(found.logits, expected / 2, rtol=1e-5, atol=1e-5)
        if found.topk_logits is not None:
            torch.testing.assert_close(found.topk_logits, (expected / 2).topk(3).values, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(ids).logits[0, :3], expected)  # outside, the model's own formula is on


def test_a_model_that_changes_its_logits_otherwise_is_rejected():
    class Squared(transformers.LlamaForCausalLM):
        def forward(self, *arguments, **keys):
            output = super().forward(*arguments, **keys)
            output.logits = output.logits.square()
            return output

    with pytest.raises(NotSupported, match="Squared changes its logits after the output head by a formula that is not"):
        require_known_formula(Squared(transformers.LlamaConfig(**SMALL, **HEADS)))


def test_a_head_with_a_formula_of_its_own_is_rejected_even_where_it_changes_nothing_yet():
    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return 1.0 * super().forward(hidden)

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS))
    model.set_output_embeddings(Scaled(SMALL["hidden_size"], SMALL["vocab_size"], bias=False))
    with pytest.raises(NotSupported, match="output head of LlamaForCausalLM, a Scaled, does more than multiply"):
        require_known_formula(model)


@pytest.mark.slow
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
        patch.setitem(vocabulary_shard.CHUNK_ELEMENTS, "cpu", rows * vocabulary)
        values = top_logits(hidden, weight, bias, None, k, temperature)
    found = read_head_output(values, HeadRequest(frozenset({"topk"}), temperature, k))
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    for token in range(count):
        order = sorted(range(vocabulary), key=lambda index: -float(logits[token, index]))[:k]
        assert found.topk_indices[token].tolist() == order
        torch.testing.assert_close(found.topk_logits[token], logits[token, order])
    torch.testing.assert_close(found.topk_normalizers, logits.logsumexp(-1))
    assert found.topk_indices.dtype == torch.int64


def test_k_above_the_vocabulary_is_an_error():
    with pytest.raises(BatchError, match="k is 4, but the model has 3 tokens"):
        top_logits(torch.zeros(1, 2), torch.zeros(3, 2), None, None, 4, 1.0)


@pytest.mark.parametrize(("rows", "most"), [(3, None), (3, 8), (50, None)])
def test_half_precision_is_multiplied_in_full(rows, most, monkeypatch):
    limit_chunks(monkeypatch, rows * 300, most)
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 64, generator=generator).div(2).bfloat16() for n in (20, 300))
    targets = torch.randint(0, 300, (20,), generator=generator)
    logprobs, entropy = chunked_logprobs(hidden, weight, None, targets, wants_entropy=True)
    expected, expected_entropy = plain(hidden.double(), weight.double(), None, targets, 1.0)
    rounded = plain((hidden @ weight.T).double(), torch.eye(300, dtype=torch.double), None, targets, 1.0)[0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    assert (rounded - expected).abs().max() > 1e-3  # as it would be from bfloat16 logits


@pytest.mark.parametrize("most", [None, 8, 64])
def test_products_of_half_precision_are_summed_in_full(most, monkeypatch):
    """As on a GPU, whose products with fp32 results a CPU lacks: they are computed in fp32 here."""

    def product(left, right, *, out_dtype=None, out=None):
        result = (left.float() @ right.float()).to(out_dtype or left.dtype)
        return result if out is None else out.copy_(result)

    def sum_with_product(total, left, right, *, beta, out_dtype, out):
        assert (total.dtype, left.dtype, out_dtype) == (torch.float32, torch.bfloat16, torch.float32)
        return out.copy_(beta * total.nan_to_num() + left.float() @ right.float())

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "addmm", sum_with_product)
    monkeypatch.setattr(logprobs_module, "_factors", lambda *factors: factors)
    limit_chunks(monkeypatch, 2000, most)
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(n, 64, generator=generator).mul_(0.35).bfloat16().requires_grad_() for n in (40, 700)]
    targets, upstream = torch.randint(0, 700, (40,), generator=generator), torch.randn(40, generator=generator)
    logprobs, entropy = chunked_logprobs(*leaves, None, targets, wants_entropy=True)
    gradients = torch.autograd.grad(logprobs, leaves, upstream)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, expected_entropy = plain(*doubles, None, targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * upstream).sum(), doubles), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - wanted).norm() <= 2**-7 * wanted.norm()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(not any(map(which, COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # raised by torch's compiler itself
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_compiled_chunks_match_the_formula(temperature, monkeypatch):
    monkeypatch.setattr(logprobs_module, "COMPILED", {"cpu"})
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(n, 8, generator=generator, requires_grad=True) for n in (20, 30)]
    targets, upstream = torch.randint(0, 30, (20,), generator=generator), torch.randn(20, generator=generator)
    limit_chunks(monkeypatch, 7 * 30, 16)
    keys = {"temperature": temperature, "wants_entropy": True, "entropy_gradient": temperature != 1.0}
    logprobs, entropy = chunked_logprobs(*leaves, None, targets, **keys)
    of_entropy = 0.0 if temperature == 1.0 else 0.3
    gradients = torch.autograd.grad((logprobs * upstream).sum() + of_entropy * entropy.sum(), leaves)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, expected_entropy = plain(*doubles, None, targets, temperature)
    total = (expected * upstream).sum() + of_entropy * expected_entropy.sum()
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(gradients, torch.autograd.grad(total, doubles), strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.skipif(not any(map(which, COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # raised by torch's compiler itself
def test_the_gradient_of_the_logits_is_one_compiled_kernel_for_all_shapes():
    """On a GPU it reads the logits once and writes their gradient in bfloat16: 6 bytes instead of 30."""
    from torch._inductor import metrics

    compiled = torch.compile(logprobs_module._gradient_of_logits, dynamic=True)
    metrics.reset()
    for rows, vocabulary in ((16, 256), (24, 128)):
        logits, normalizers, scale = torch.randn(rows, vocabulary), torch.randn(rows), torch.randn(rows)
        compiled(logits, normalizers, torch.randint(vocabulary, (rows,)), scale, scale, torch.bfloat16)
        assert metrics.generated_kernel_count == 1
