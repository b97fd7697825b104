"""Batches whose every token is known, and expectations computed row by row in plain Python.

Token c of row r is 100 r + c + 1, so a token identifies its place; padding holds a token that no row has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import BatchPlan

PADDING = 99_999
PADDED, DYNAMIC, PACKED = BatchPlan("padded", 3, 0), BatchPlan("dynamic", 1, 24), BatchPlan("packed", 1, 24)
PLANS = (PADDED, DYNAMIC, PACKED)
"""One plan per mode; no row of `ragged_batches` exceeds their limits, even when padded to a multiple of 8."""


def batch_of(
    lengths: Sequence[int],
    *,
    width: int | None = None,
    token_mask: Sequence[Sequence[int]] | None = None,
    sample_mask: Sequence[int] | None = None,
) -> BatchedDataDict[Any]:
    """Return rows with the given lengths, plus a list, a per-token and a per-row field. Masks default to ones."""
    width = max(lengths) if width is None else width
    real = [[column < length for column in range(width)] for length in lengths]
    ids = [[100 * r + c + 1 if here else PADDING for c, here in enumerate(row)] for r, row in enumerate(real)]
    wanted = [[int(here) for here in row] for row in real] if token_mask is None else token_mask
    return BatchedDataDict(
        {
            "input_ids": torch.tensor(ids, dtype=torch.int64).reshape(len(lengths), width),
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            "token_mask": torch.tensor(wanted, dtype=torch.float32).reshape(len(lengths), width),
            "sample_mask": torch.tensor(sample_mask or [1] * len(lengths), dtype=torch.float32),
            "name": [f"row {row}" for row in range(len(lengths))],
            "advantages": torch.tensor(ids, dtype=torch.float32).reshape(len(lengths), width) / 2,
            "reward": torch.arange(len(lengths), dtype=torch.float32) / 4,
        }
    )


def ragged_batches(count: int = 24) -> Iterator[BatchedDataDict[Any]]:
    """Yield batches of up to 9 rows of 0 to 12 tokens with random masks, the same ones on every call."""
    dice = random.Random(20)
    for _ in range(count):
        lengths = [dice.randint(0, 12) for _ in range(dice.randint(1, 9))]
        width = max(lengths) + dice.randint(0, 3)
        mask = [[int(c < length and dice.random() < 0.5) for c in range(width)] for length in lengths]
        yield batch_of(lengths, width=width, token_mask=mask, sample_mask=[int(dice.random() < 0.7) for _ in lengths])


def lengths_of(data: BatchedDataDict[Any], rows: Sequence[int] | None = None) -> list[int]:
    """Return the lengths of all rows, or of `rows`."""
    lengths: list[int] = data["input_lengths"].tolist()
    return lengths if rows is None else [lengths[row] for row in rows]


def targets_of(data: BatchedDataDict[Any], row: int, positions: str) -> list[int]:
    """Return the columns of `row` that are targets: never the first token, never padding."""
    columns = range(1, lengths_of(data)[row])
    if positions == "all":
        return list(columns)
    if positions == "loss" and not data["sample_mask"].tolist()[row]:
        return []
    mask = data["token_mask"][row].tolist()
    return [column for column in columns if mask[column]]


def rows_with_targets(data: BatchedDataDict[Any], positions: str) -> list[int]:
    """Return the rows that have at least one target."""
    return [row for row in range(data.size) if targets_of(data, row, positions)]


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple
