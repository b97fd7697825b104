"""Batches for tests, whose values in each row identify the row."""

from __future__ import annotations

import pickle

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict


def make_batch(rows, width=3):
    """A value of every kind, which identify the row they are in."""
    number = torch.arange(rows)
    return BatchedDataDict(
        one=number.clone(),
        two=number[:, None] * 10 + torch.arange(width),
        three=(number[:, None, None] + torch.zeros(width, 2)).to(torch.bfloat16),
        mask=number % 2 == 0,
        text=[f"row {row}" for row in range(rows)],
        objects=[{"row": row} for row in range(rows)],
    )


def numbers(batch):
    """Return the rows of `make_batch` that are in `batch`, after checking that all values agree on them."""
    rows = batch["one"].tolist()
    assert batch["text"] == [f"row {row}" for row in rows]
    assert batch["objects"] == [{"row": row} for row in rows]
    assert (batch["two"][:, 0] // 10).tolist() == rows
    assert batch["mask"].tolist() == [row % 2 == 0 for row in rows]
    assert batch["three"].shape[2] == 2
    assert batch["three"][:, 0, 1].tolist() == [float(row) for row in rows]
    return rows


def same(one, two):
    assert list(one) == list(two)
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == two[key].dtype
            assert torch.equal(value, two[key])
        else:
            assert value == two[key]


def pickled_and_back(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - just written here


def shares_memory(one, two):
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
