"""The rows of a global batch and the counts that losses are divided by. Left out: microbatches (`processing`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.data.ranks import sum_over_ranks
from rlframework.errors import BatchError, BatchKeyError
from rlframework.interfaces.loss import LossType

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlframework.distributed.batched_data_dict import BatchedDataDict


def process_global_batch(
    data: BatchedDataDict[Any],
    loss_fn: Any,
    dp_group: ProcessGroup | None,
    *,
    batch_idx: int,
    batch_size: int | None,
) -> dict[str, Any]:
    """This rank's rows of a global batch, and what losses are divided by.

    Returns `batch`: `data.get_batch(batch_idx, batch_size)`; `global_valid_seqs`: the sum of `sample_mask [B]`;
    `global_valid_toks`: that of `token_mask[:, 1:] * sample_mask[:, None]` (nothing predicts the first token). The last
    two are 0-dimensional fp32 on the device of the batch, summed over `dp_group` (None: this rank alone), in one
    exchange of two numbers. A rank may have no rows.

    Not as in NeMo-RL: without `token_mask [B, S]`, every real token but the first of a row counts (of `input_lengths`,
    else of S; there it is all S); all that is wrong is a `BatchError` before ranks talk to each other; nothing is
    moved to CUDA.
    """
    batch = data.get_batch(batch_idx, batch_size)
    sample_mask = read_mask(batch, "sample_mask", 1)
    if sample_mask is None:
        raise BatchKeyError(f"sample_mask must be present in the data! It has {sorted(batch, key=str)}")
    token_mask = read_mask(batch, "token_mask", 2)
    if token_mask is None and _value(getattr(loss_fn, "loss_type", None)) == LossType.TOKEN_LEVEL:
        raise BatchKeyError(
            "token_mask must be present in the data when using token-level loss; it has " + str(sorted(batch, key=str))
        )
    targets = _all_targets(batch) if token_mask is None else token_mask[:, 1:].sum(1, dtype=torch.float32)
    weights = sample_mask.to(torch.float32)
    seqs, toks = weights.sum(), (targets * weights).sum()
    if dp_group is not None:
        seqs, toks = sum_over_ranks(torch.stack((seqs, toks)), dp_group)
    return {"batch": batch, "global_valid_seqs": seqs, "global_valid_toks": toks}


def check_tokens(data: BatchedDataDict[Any]) -> Tensor:
    """`input_ids`; a `BatchError` unless they are integers `[B, S]` and `input_lengths`, if there, is `[B]`."""
    input_ids, lengths = data.get("input_ids"), data.get("input_lengths")
    if input_ids is None:
        raise BatchKeyError(f"input_ids must be present in the data; it has {sorted(data, key=str)}")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        raise BatchError(f"input_ids must be a tensor of token ids [B, S], got {described(input_ids)}")
    if lengths is not None and (not isinstance(lengths, Tensor) or lengths.shape != input_ids.shape[:1]):
        raise BatchError(f"input_lengths must be a tensor of {len(input_ids)} lengths, got {described(lengths)}")
    return input_ids


def read_mask(batch: BatchedDataDict[Any], key: str, ndim: int) -> Tensor | None:
    """`batch[key]`, None where it is absent; a `BatchError` unless it is a tensor of `ndim` dimensions."""
    mask = batch.get(key)
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != ndim):
        raise BatchError(f"{key} must be a tensor {('[B]', '[B, S]')[ndim - 1]}, got {described(mask)}")
    return mask


def _all_targets(batch: BatchedDataDict[Any]) -> Tensor:
    """`[B]`: tokens of each row that another precedes."""
    input_ids = check_tokens(batch)
    if "input_lengths" in batch:
        lengths: Tensor = batch["input_lengths"]
        return (lengths - 1).clamp(min=0).to(torch.float32)
    count, width = input_ids.shape
    return torch.full((count,), max(width - 1, 0), dtype=torch.float32, device=input_ids.device)


def _value(member: Any) -> Any:
    """The value of an enum's member: NeMo-RL's loss types are not ours, but have the same values."""
    return getattr(member, "value", member)


def described(value: Any) -> str:
    """Dtype and shape of a tensor, the type of anything else: for messages."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
