"""What must hold of a batch before it is trained on or scored, and which of its rows are work.

`check_rows` is cheap and done wherever rows arrive; `check_contents` reads every token and is done once, by the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.errors import BatchError, BatchKeyError
from rlframework.microbatches.global_batch import check_sequence_dim, check_tokens, read_mask

if TYPE_CHECKING:
    from rlframework.batch.batched_data_dict import BatchedDataDict


def check_rows(data: BatchedDataDict[Any]) -> None:
    """`BatchError` unless `data` has rows of tokens in the shapes that it must have.

    `input_ids [B, S]`, `input_lengths [B]` whole numbers from 0 to S, and where they are there `sample_mask [B]` and
    `token_mask [B, S]`. Tensors of more dimensions have S, or 1, at dimension 1.
    """
    width = check_tokens(data).shape[1]
    for key, dimensions in (("token_mask", 2), ("sample_mask", 1)):
        read_mask(data, key, dimensions)
    if "input_lengths" not in data:
        raise BatchKeyError(f"input_lengths must be present in the data; it has {sorted(data)}")
    check_sequence_dim(data, skip_keys=[k for k, v in data.items() if isinstance(v, Tensor) and v.shape[1:2] == (1,)])
    lengths = data["input_lengths"]
    wrong = ((lengths < 0) | (lengths > width)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(
            f"row {row} has input_lengths {int(lengths[row])}; the columns of input_ids allow 0 to {width}"
        )


def check_contents(data: BatchedDataDict[Any], vocabulary: int | None = None) -> None:
    """`BatchError` unless the rows of `data`, which `check_rows` passed, hold what they must.

    At least one has a token; tokens are ids below `vocabulary` (None: not known), whatever the padding is; and
    `token_mask` is 0 on padding.
    """
    ids, lengths, real = data["input_ids"], data["input_lengths"], real_tokens(data)
    if not bool((lengths > 0).any()):
        raise BatchError(f"none of the {len(lengths)} rows has a token: input_lengths are all 0")
    unknown = (ids < 0) if vocabulary is None else (ids < 0) | (ids >= vocabulary)
    if bool(unknown.logical_and_(real).any()):
        row, column = unknown.nonzero()[0].tolist()
        allowed = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}, which the model has embeddings for"
        raise BatchError(
            f"row {row} has the token {int(ids[row, column])} at position {column}; allowed is {allowed}. Is it from "
            "another tokenizer, or is the row shorter than its input_lengths?"
        )
    if "token_mask" not in data:
        return
    stray = (data["token_mask"] != 0).logical_and_(real.logical_not_())
    if bool(stray.any()):
        row, column = stray.nonzero()[0].tolist()
        raise BatchError(
            f"token_mask of row {row} is set at position {column}, which is padding: the row has "
            f"{int(lengths[row])} tokens. Set it to 0 there"
        )


def check_fits(longest: int, mode: str, tokens: int) -> None:
    """`BatchError` where a row of `longest` tokens is more than a microbatch may have."""
    if longest > tokens:
        raise BatchError(
            f"a row has {longest} tokens, but a {mode} microbatch may have {tokens}; raise policy.batching.tokens (or "
            "logprob_tokens, when scoring) or shorten the rows"
        )


def real_tokens(data: BatchedDataDict[Any]) -> Tensor:
    """`[B, S]` bool: what is no padding."""
    input_ids = data["input_ids"]
    real: Tensor = torch.arange(input_ids.shape[1], device=input_ids.device) < data["input_lengths"][:, None]
    return real


def rows_with_targets(data: BatchedDataDict[Any], positions: str) -> Tensor:
    """`[B]` bool: the rows that are any work at `positions`; `BatchError` if that is none of `DataProcessor`'s."""
    if positions == "last":
        there: Tensor = data["input_lengths"] > 0
        return there
    if positions == "all":
        long_enough: Tensor = data["input_lengths"] > 1
        return long_enough
    if positions not in ("token_mask", "loss"):
        raise BatchError(f"positions is {positions!r}; take 'all', 'token_mask', 'loss' or 'last'")
    for key in ("token_mask", "sample_mask")[: 1 if positions == "token_mask" else 2]:
        if key not in data:
            raise BatchError(f"{key} must be present in the data for positions={positions!r}; it has {sorted(data)}")
    wanted: Tensor = (data["token_mask"][:, 1:] != 0).any(dim=1)
    return wanted if positions == "token_mask" else wanted & (data["sample_mask"] != 0)
