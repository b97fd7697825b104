"""Tiny vision-language models: log-probabilities do not depend on how rows with and without images are batched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_vlms
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.nemo_rl.microbatches import get_microbatch_iterator

FIXED: dict[str, Any] = {"dynamic_batching": {"enabled": False}}
DYNAMIC: dict[str, Any] = {"dynamic_batching": {"enabled": True}}
IMAGES = [1, 0, 2, 0, 0, 1, 3, 1]


@pytest.fixture(scope="module", params=tiny_vlms.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return tiny_vlms.make_model(family)


@pytest.fixture(scope="module")
def rows(family):
    return tiny_vlms.make_rows(family, IMAGES)


@pytest.fixture(scope="module")
def expected(model, rows):
    with torch.no_grad():
        return tiny_vlms.alone(model, rows)


@torch.no_grad()
def scored(model: Any, data: BatchedDataDict[Any], cfg: Any, mbs: int) -> torch.Tensor:
    """Log-probabilities `[B, S]` computed in microbatches, in the order of the rows."""
    found = []
    iterator, count = get_microbatch_iterator(data, cfg, mbs, None, SimpleNamespace(eos_token_id=2))
    parts = list(iterator)
    assert len(parts) == count
    for part in parts:
        inputs = part.processed_inputs
        logits = model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **inputs.vlm_kwargs,
        ).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(2, inputs.input_ids[:, 1:, None])[..., 0]
        real = torch.arange(inputs.seq_len) < part.data_dict["input_lengths"][:, None]
        padded = torch.zeros(len(chosen), data["input_ids"].shape[1])
        padded[:, 1 : inputs.seq_len] = chosen * real[:, 1:]
        found.append(padded)
    return torch.cat(found)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_images_matter(model, rows, expected):
    """Otherwise the other tests would prove nothing."""
    others = BatchedDataDict(rows)
    others["pixel_values"] = tiny_vlms.PackedTensor(
        [None if each is None else -each for each in rows["pixel_values"].tensors], rows["pixel_values"].dim_to_pack
    )
    with torch.no_grad():
        change = (tiny_vlms.alone(model, others) - expected).abs().amax(1)
    assert [bool(each > 0.1) for each in change] == [count > 0 for count in IMAGES]


@pytest.mark.parametrize("mbs", [1, 2, 4, 8])
def test_padded_microbatches(model, rows, expected, mbs):
    """Sizes 2 and 4 mix rows with and without images in one microbatch; with size 1, one microbatch has no images."""
    close(scored(model, rows, FIXED, mbs), expected)


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 4, 0, 2, 7, 5, 6]])
def test_another_order(model, rows, expected, order):
    """Rows 3, 1 and 4 have no image: the second order begins with a microbatch of text."""
    close(scored(model, rows.select_indices(order), FIXED, 2), expected[order])


@pytest.mark.parametrize("tokens", [30, 60])
def test_dynamic_microbatches(model, rows, expected, tokens):
    args = {
        "max_tokens_per_microbatch": tokens,
        "sequence_length_round": 1,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    shards, indices = rows.shard_by_batch_size(2, dynamic_batching_args=args)
    found = BatchedDataDict({"logprobs": torch.cat([scored(model, shard, DYNAMIC, 1) for shard in shards])})
    found.reorder_data(indices)
    close(found["logprobs"], expected)


def test_rows_without_images_in_between(family, model, rows, expected):
    """Row 1 has none; after each row it makes a batch of 16, with the images at other positions."""
    mixed = rows.select_indices([index for row in range(8) for index in (row, 1)])
    found = scored(model, mixed, FIXED, 16)
    close(found[::2], expected)
    close(found[1::2], expected[1:2].expand(8, -1))


def test_all_rows_are_text(family, model, rows, expected):
    text = rows.select_indices([1, 3, 4])
    close(scored(model, text, FIXED, 3), expected[[1, 3, 4]])
