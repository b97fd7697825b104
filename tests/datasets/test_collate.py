"""Rows side by side."""

from __future__ import annotations

import pytest
import torch

from rlframework.datasets.collate import pad_rendered, pad_rows
from rlframework.errors import DataError


def test_rows_are_padded_on_the_right() -> None:
    ids, lengths = pad_rows([[1, 2, 3], [4], []], 9)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert lengths.tolist() == [3, 1, 0]
    assert ids.dtype == lengths.dtype == torch.int64


def test_masks_go_with_them() -> None:
    rows = pad_rendered([([1, 2, 3], [False, True, True]), ([4], [True])], 0)
    assert rows.input_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert rows.input_lengths.tolist() == [3, 1]
    assert rows.token_mask.tolist() == [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def test_no_rows() -> None:
    with pytest.raises(DataError, match="cannot make a batch of no rows"):
        pad_rows([], 0)
