"""The roomy cache holds what transformers' own holds, whatever is done to it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, MistralConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlframework_transformers.cache import PreallocatedLayer, decoding_cache

_SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
_ACTIONS = st.lists(st.one_of(st.integers(1, 90), st.sampled_from(["reorder", "select", "crop"])), max_size=12)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(_ACTIONS)
def test_it_holds_what_the_layer_of_transformers_holds(actions: list[int | str]) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs, rows = PreallocatedLayer(), DynamicLayer(), 3
    for action in [2, *actions]:
        if isinstance(action, int):
            new = [torch.rand(rows, 2, action, 4, generator=generator) for _ in range(2)]
            returned, expected = ours.update(*new), theirs.update(*new)
            assert all(map(torch.equal, returned, expected))
        elif action == "reorder":
            order = torch.randint(0, rows, (rows,), generator=generator)
            ours.reorder_cache(order)
            theirs.reorder_cache(order)
        elif action == "select" and rows > 1:
            rows -= 1
            ours.batch_select_indices(torch.arange(rows))
            theirs.batch_select_indices(torch.arange(rows))
        elif action == "crop" and theirs.get_seq_length() > 1:
            ours.crop(-1)
            theirs.crop(-1)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_one_more_token_is_written_in_place_but_not_to_what_the_caller_gave() -> None:
    layer, given_keys, token = PreallocatedLayer(), torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 1, 2)
    layer.update(given_keys, given_keys)
    layer.update(token, token)
    where = layer.keys.data_ptr()
    for _ in range(60):
        layer.update(token, token)
    assert layer.keys.data_ptr() == where
    assert layer.keys.sum() == 61 * 2
    layer.keys[..., 0, :] = 7
    assert given_keys.sum() == 0


def test_only_plain_layers_are_replaced() -> None:
    plain = decoding_cache(LlamaConfig(**_SHAPE))
    windows = decoding_cache(MistralConfig(**_SHAPE, sliding_window=4))
    assert [type(layer) for layer in plain.layers] == [PreallocatedLayer, PreallocatedLayer]
    assert [type(layer) for layer in windows.layers] == [DynamicSlidingWindowLayer] * 2
    assert isinstance(plain, DynamicCache)


def test_a_known_capacity_is_allocated_once_and_fewer_rows_stay_in_place() -> None:
    layer, prompt = PreallocatedLayer(200), torch.arange(24.0).view(4, 1, 3, 2)
    layer.update(prompt, prompt)
    token = torch.zeros(4, 1, 1, 2)
    layer.update(token, token)
    where = layer.keys.data_ptr()
    layer.reorder_cache(torch.tensor([3, 1]))
    assert torch.equal(layer.keys[:, :, :3], prompt[[3, 1]])
    for _ in range(196):
        layer.update(token[:2], token[:2])
    assert (layer.keys.shape, layer.keys.data_ptr()) == ((2, 1, 200, 2), where)
    assert torch.equal(layer.values[:, :, :3], prompt[[3, 1]])
