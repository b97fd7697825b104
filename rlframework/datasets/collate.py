"""Batch rows of different lengths with right padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlframework.datasets.rendering import Rendered
from rlframework.errors import DataError


class TokenRows(NamedTuple):
    """A padded batch: `input_ids [B, S]` int64, `input_lengths [B]` int64, `token_mask [B, S]` fp32."""

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    token_mask: torch.Tensor


def pad_rows(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad lists of token ids on the right to `[B, S]` int64; also return the lengths, `[B]` int64.

    Raises a `DataError` if there are no rows.
    """
    if not rows:
        raise DataError("cannot make a batch of no rows; give at least one")
    lengths = [len(row) for row in rows]
    padded = np.full((len(rows), max(lengths)), pad_id, np.int64)
    for number, row in enumerate(rows):
        padded[number, : lengths[number]] = row
    return torch.from_numpy(padded), torch.tensor(lengths)


def pad_rendered(rows: Sequence[Rendered], pad_id: int) -> TokenRows:
    """Batch the rows that `rendering.render_samples` returns; the mask is 1 on tokens that are trained on."""
    input_ids, lengths = pad_rows([ids for ids, _ in rows], pad_id)
    mask = torch.zeros(input_ids.shape)
    for number, (_, trained) in enumerate(rows):
        mask[number, : len(trained)] = torch.tensor(trained, dtype=torch.float32)
    return TokenRows(input_ids, lengths, mask)
