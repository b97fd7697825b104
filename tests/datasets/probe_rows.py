"""Rows in which each token tells where it stood, and NeMo-RL's settings for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict

EOS = 9
TOKENIZER = SimpleNamespace(eos_token_id=EOS, pad_token_id=None)
OFF = {"enabled": False}
FIXED: dict[str, Any] = {"dynamic_batching": OFF}
DYNAMIC: dict[str, Any] = {"dynamic_batching": {"enabled": True}}
PACKED: dict[str, Any] = {"dynamic_batching": OFF, "sequence_packing": {"enabled": True, "train_mb_tokens": 500}}


def rows_of(lengths: list[int], width: int | None = None, **more: Any) -> BatchedDataDict[Any]:
    """Row r holds the tokens 10 r + 1, 10 r + 2, ..., and its number; padding is 0."""
    columns = torch.arange(width or max(lengths, default=0))
    real = columns < torch.tensor(lengths, dtype=torch.int64)[:, None]
    ids = (torch.arange(len(lengths))[:, None] * 10 + columns + 1) * real
    rows = {"input_ids": ids, "input_lengths": torch.tensor(lengths, dtype=torch.int64)}
    return BatchedDataDict({**rows, "number": torch.arange(len(lengths)), **more})


def changed(**values: Any) -> BatchedDataDict[Any]:
    """Two good rows with masks, and other values; None takes a key away."""
    data = rows_of([2, 3], sample_mask=torch.ones(2), token_mask=torch.ones(2, 3))
    data.update(values)
    return BatchedDataDict({key: value for key, value in data.items() if value is not None})
