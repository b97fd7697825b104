"""Checks of a batch before training or scoring, and selection of the rows that take part.

`check_rows` is cheap and is called by every receiver of rows; `check_contents` reads every token and is called only by
the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.batch.batch_rows import read_lengths
from rlframework.errors import BatchError, BatchKeyError
from rlframework.microbatches.global_batch import check_sequence_dim, check_tokens, read_mask

if TYPE_CHECKING:
    from rlframework.batch.batched_data_dict import BatchedDataDict


def check_rows(data: BatchedDataDict[Any]) -> None:
    """Raise `BatchError` unless the tensors of `data` have the required shapes.

    Required: `input_ids [B, S]`; `input_lengths [B]`, integers from 0 to S; `sample_mask [B]` and `token_mask [B, S]`,
    if present; and S or 1 at dimension 1 of all tensors that have it.
    """
    width = check_tokens(data).shape[1]
    for key, dimensions in (("token_mask", 2), ("sample_mask", 1)):
        read_mask(data, key, dimensions)
    if "input_lengths" not in data:
        raise BatchKeyError(f"input_lengths must be present in the data; it has {sorted(data)}")
    check_sequence_dim(data, skip_keys=[k for k, v in data.items() if isinstance(v, Tensor) and v.shape[1:2] == (1,)])
    read_lengths(data["input_lengths"], width)


def check_contents(data: BatchedDataDict[Any], vocabulary: int | None = None) -> None:
    """Raise `BatchError` unless the values of `data`, which has passed `check_rows`, are valid.

    At least one row must have a token; tokens, but not padding, must be ids from 0 to below `vocabulary` (None:
    unknown); and `token_mask` must be 0 on padding.
    """
    ids, lengths, real = data["input_ids"], data["input_lengths"], real_tokens(data)
    if not bool((lengths > 0).any()):
        raise BatchError(f"none of the {len(lengths)} rows has a token: all input_lengths are 0")
    unknown = (ids < 0) if vocabulary is None else (ids < 0) | (ids >= vocabulary)
    if bool(unknown.logical_and_(real).any()):
        row, column = unknown.nonzero()[0].tolist()
        allowed = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}, the model's embeddings"
        raise BatchError(
            f"row {row} has token {int(ids[row, column])} at position {column}; allowed is {allowed}. Is it from "
            "another tokenizer, or is the row shorter than its input_lengths?"
        )
    if "token_mask" not in data:
        return
    stray = (data["token_mask"] != 0).logical_and_(real.logical_not_())
    if bool(stray.any()):
        row, column = stray.nonzero()[0].tolist()
        raise BatchError(
            f"token_mask of row {row} is set at position {column}, which is padding, as the row has "
            f"{int(lengths[row])} tokens; set it to 0 there"
        )


def check_fits(longest: int, mode: str, tokens: int) -> None:
    """Raise `BatchError` if a row of `longest` tokens exceeds the limit of a microbatch."""
    if longest > tokens:
        raise BatchError(
            f"a row has {longest} tokens, but a {mode} microbatch may have {tokens}; raise policy.batching.tokens "
            "(policy.batching.logprob_tokens for scoring) or shorten the rows"
        )


def real_tokens(data: BatchedDataDict[Any]) -> Tensor:
    """Return `[B, S]` bool: False at padding."""
    input_ids = data["input_ids"]
    real: Tensor = torch.arange(input_ids.shape[1], device=input_ids.device) < data["input_lengths"][:, None]
    return real


def rows_with_targets(data: BatchedDataDict[Any], positions: str) -> Tensor:
    """Return `[B]` bool: rows with at least one target at `positions`; raise `BatchError` for unknown `positions`."""
    if positions == "last":
        has_tokens: Tensor = data["input_lengths"] > 0
        return has_tokens
    if positions == "all":
        long_enough: Tensor = data["input_lengths"] > 1
        return long_enough
    if positions not in ("token_mask", "loss"):
        raise BatchError(f"unknown positions {positions!r}; use 'all', 'token_mask', 'loss' or 'last'")
    for key in ("token_mask", "sample_mask")[: 1 if positions == "token_mask" else 2]:
        if key not in data:
            raise BatchError(f"{key} must be present in the data for positions={positions!r}; it has {sorted(data)}")
    wanted: Tensor = (data["token_mask"][:, 1:] != 0).any(dim=1)
    return wanted if positions == "token_mask" else wanted & (data["sample_mask"] != 0)
