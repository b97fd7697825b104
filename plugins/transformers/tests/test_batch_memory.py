"""The rows that fit into a GPU's memory: bytes counted by hand and from real caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

from rlframework.generation.engine_model import cache_argument
from rlframework_transformers import engine as transformers_engine
from rlframework_transformers.cache import cache_bytes, free_bytes, row_bytes, rows_that_fit
from rlframework_transformers.decoding import RowBatch

_SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL |= {"num_hidden_layers": 3, "vocab_size": 16}


def qwen3(**sizes: Any) -> Qwen3Config:
    """The sizes of Qwen3-0.6B."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936} | sizes
    return Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128, **sizes)


def test_bytes_of_a_token_by_hand() -> None:
    token = 2 * 28 * 8 * 128 * 2
    assert cache_bytes(qwen3(), 1, 2) == token == 114_688
    assert 256 * cache_bytes(qwen3(), 4096, 2) == 256 * 4096 * token  # 112 GiB


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_SMALL),
        MistralConfig(**_SMALL, sliding_window=6, head_dim=4),
        Qwen3MoeConfig(**_SMALL, head_dim=6, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    ],
    ids=["llama", "sliding window", "head size of its own"],
)
def test_bytes_are_those_of_a_cache(config: Any) -> None:
    model, cache = AutoModelForCausalLM.from_config(config).eval(), DynamicCache(config=config)
    with torch.no_grad():
        for _ in range(9):
            model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    window = getattr(config, "sliding_window", None)
    spare = held // (window - 1) if window else 0  # transformers keeps one position less than the window
    assert cache_bytes(config, 9, 4) == held + spare


def test_rows_by_hand() -> None:
    sizes = {"prompt": 512, "total": 4096, "width": 2}
    cache = 4096 * 114_688
    prompt = 512 * ((4 * 1024 + 3 * 3072) * 2 + 8 * 1024 + 3 * 512)
    assert row_bytes(qwen3(), **sizes) == cache + cache // 28 + 10 * 151_936 + prompt
    free = 64 * 2**30
    rows = rows_that_fit(free, qwen3(), truncated=False, **sizes)
    assert rows == int(0.9 * free - 40 * 2**23) // row_bytes(qwen3(), **sizes) == 121
    assert rows_that_fit(free, qwen3(), truncated=True, **sizes) == rows - 1
    assert rows_that_fit(0, qwen3(), truncated=False, **sizes) == 1
    assert free_bytes(torch.device("cpu")) is None


@pytest.mark.slow
def test_a_batch_is_what_fits(tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 rows 3 fit, and are those that are decoded together."""
    data, engine = batch([[3, 9, 4]] * 4 + [[5]] * 3), tiny.engine(max_new_tokens=12)
    whole = engine.generate(data)
    config, sizes = tiny.model.config, {"prompt": 3, "total": 15, "width": 4}
    row, active, step = row_bytes(config, **sizes), [], RowBatch.step

    def free(device: torch.device) -> int:
        rows = sum(len(each) for _, each in engine.engine._batches)
        return int((3.5 * row + 40 * 2**23) / 0.9) - rows * row

    monkeypatch.setattr(transformers_engine, "free_bytes", free)
    monkeypatch.setattr(RowBatch, "step", lambda rows: active.append(len(rows)) or step(rows))
    split = engine.generate(data)
    assert max(active) == 3
    assert torch.equal(split["output_ids"], whole["output_ids"])
    torch.testing.assert_close(split["logprobs"], whole["logprobs"], atol=1e-5, rtol=1e-5)
