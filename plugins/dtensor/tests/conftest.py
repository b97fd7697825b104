"""A model, a batch, and the oracle on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_conformance.oracle import Oracle

WORD_COUNT = 40


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model_path(request, tmp_path_factory):
    """A random Llama with grouped heads, its head tied or not."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+=?")
    return make_llama(path, tokenizer, hidden=32, layers=2, heads=4, kv_heads=2, tied=request.param, init_std=0.2)


@pytest.fixture
def tokenizer(model_path):
    from rlframework.huggingface.tokenizer import load_tokenizer

    return load_tokenizer(str(model_path))


def make_batch(rows: int, width: int = 14, seed: int = 0) -> BatchedDataDict[Any]:
    """Ragged rows of random tokens with everything that a policy-gradient loss reads."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    real = torch.arange(width) < lengths[:, None]
    asked = torch.rand(rows, width, generator=generator) > 0.4
    sample_mask = torch.ones(rows)
    sample_mask[1] = 0.0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, WORD_COUNT, (rows, width), generator=generator) * real,
            "input_lengths": lengths,
            "token_mask": (real & asked).float(),
            "sample_mask": sample_mask,
            "advantages": torch.randn(rows, width, generator=generator),
        }
    )


@pytest.fixture
def batch() -> BatchedDataDict[Any]:
    return make_batch(8)


@pytest.fixture
def oracle(model_path):
    """`oracle(**settings)`: the conformance suite's, on the weights at `model_path`."""
    return lambda **settings: Oracle(model_path, **settings)


@pytest.fixture
def batches():
    """`batches(count, rows)`: different batches."""
    return lambda count, rows=8: [make_batch(rows, seed=100 + number) for number in range(count)]
