"""Decoding on an accelerator, on a device that computes on the CPU: what it waits for, allocates and returns."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from probe_decoding import generate
from probe_forked import run_forked
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from rlframework_transformers.row_forward import ATTENTION, decoding_attention, grouped_attention, logits_in_fp32

RAGGED = [[5], [3, 9, 4, 12, 6], [3, 9, 4, 12, 6], [7, 2, 13] * 7, [14, 13], [8] * 11, [5, 5], [2]]


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [RAGGED, [[3, 9, 4]] * 8], ids=["padded", "equal"])
def test_it_waits_once_for_sixteen_tokens_and_allocates_once(tiny: Any, batch: Any, completions: Any, prompts) -> None:
    """Rows that have ended stay in the batch until the next wait, so the result shows that their tokens are dropped."""
    works = [(8, []), (24, []), (72, []), (72, [1, 4])]
    done = run_forked(generate, tiny.path, prompts, works)
    assert done.returncode == 0, done.stderr
    *found, ended = [json.loads(line) for line in done.stdout.splitlines()]
    at_the_end = len(found[0]["waits"])
    assert at_the_end <= 4
    assert [len(each["waits"]) for each in found] == [at_the_end, at_the_end + 1, at_the_end + 4]
    assert [each["allocated"] for each in found] == [4, 4, 4], "keys and values of two layers, whatever the length"
    expected = tiny.engine(max_new_tokens=72, stop_token_ids=[1, 4]).generate(batch(prompts))
    assert ended["tokens"] == completions(expected)
    assert len({len(row) for row in ended["tokens"]}) > 3
    scores = [torch.tensor(row) for row in ended["logprobs"]]
    for row, (one, prompt) in enumerate(zip(scores, prompts, strict=True)):
        own = expected["logprobs"][row, len(prompt) : len(prompt) + len(one)]
        torch.testing.assert_close(one, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [2, 6])
def test_attention_of_one_query_with_a_mask(heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, count, length, 4, generator=generator, dtype=torch.float64)
        for count, length in ((heads, 1), (2, 5), (2, 5))
    )
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()[:, None, None, :]
    module = nn.Module()
    module.num_key_value_groups = heads // 2
    found, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    for row in range(3):
        for head in range(heads):
            shared, seen = head // (heads // 2), mask[row, 0, 0]
            scores = 0.3 * key[row, shared, seen] @ query[row, head, 0]
            expected = torch.softmax(scores, 0) @ value[row, shared, seen]
            torch.testing.assert_close(found[row, 0, head], expected, rtol=1e-12, atol=1e-12)


class _NewBytes(TorchDispatchMode):
    """The bytes of the largest tensor that is made, views apart."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def test_no_key_or_value_is_copied() -> None:
    query, key = torch.randn(3, 8, 1, 16), torch.randn(3, 2, 512, 16)
    mask = torch.ones(3, 1, 1, 512, dtype=torch.bool)
    with _NewBytes() as made:
        grouped_attention(nn.Module(), query, key, key, mask)
    assert made.largest <= 4 * mask.numel() < key.nbytes


def test_logits_of_a_half_precision_head_are_fp32_products() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, initializer_range=1.0)).bfloat16().eval()
    ids = torch.tensor([[3, 9, 4]])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        exact = hidden.double() @ model.lm_head.weight.double().T
        with logits_in_fp32(model, torch.device("cuda")):
            found = model(ids).logits
        with logits_in_fp32(model, torch.device("cpu")):
            assert model(ids).logits.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-4 < (exact.bfloat16() - exact).abs().max()


def test_only_an_accelerators_sdpa_is_replaced() -> None:
    for given, device, used in (
        ("sdpa", "cpu", "sdpa"),
        ("eager", "cuda", "eager"),
        ("sdpa", "cuda", ATTENTION),
    ):
        config = LlamaConfig(attn_implementation=given)
        with decoding_attention(config, torch.device(device)):
            assert config._attn_implementation == used
        assert config._attn_implementation == given
