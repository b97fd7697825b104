"""The rows of a global batch and their groups, the counts that losses are divided by, and checks of shapes.

The driver checks the values: `rlframework.policy.batch_checks`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batch_rows import describe, is_integral, read_lengths
from rlframework.batch.collectives import sum_over_ranks
from rlframework.interfaces.data_processor import GlobalBatch, RowsToPlan
from rlframework.interfaces.loss import GROUP_IDS, LossType

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlframework.batch.batched_data_dict import BatchedDataDict


def process_global_batch(
    data: BatchedDataDict[Any],
    loss_fn: Any,
    dp_group: ProcessGroup | None,
    *,
    batch_idx: int,
    batch_size: int | None,
) -> GlobalBatch:
    """Return this rank's rows of a global batch and its counts; see `DataProcessor.process_global_batch`.

    The counts are on the device of the batch, and summed over `dp_group` in one all-reduce of two numbers. A rank may
    have no rows.

    Differences from NeMo-RL: without `token_mask [B, S]`, every real token of a row except the first counts, by
    `input_lengths` or else by S (NeMo-RL counts all S). Every error is raised as a `BatchError` before the ranks
    communicate. Nothing is moved to CUDA. Masks of the wrong shape raise.
    """
    batch = data.get_batch(batch_idx, batch_size)
    if "input_ids" in batch:
        check_tokens(batch)
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
    """Return `input_ids`; raise `BatchError` unless they are integers `[B, S]`, and `input_lengths` integers `[B]`."""
    input_ids, lengths = data.get("input_ids"), data.get("input_lengths")
    if input_ids is None:
        raise BatchKeyError(f"input_ids must be present in the data; it has {sorted(data, key=str)}")
    if not is_integral(input_ids) or input_ids.ndim != 2:
        raise BatchTypeError(f"input_ids must be a tensor of integer token ids [B, S], got {describe(input_ids)}")
    if lengths is None:
        return input_ids
    if not isinstance(lengths, Tensor) or lengths.shape != input_ids.shape[:1]:
        raise BatchError(f"input_lengths must be a tensor of {len(input_ids)} lengths, got {describe(lengths)}")
    if not is_integral(lengths):
        raise BatchTypeError(f"input_lengths must be integers, got {describe(lengths)}")
    return input_ids


def check_sequence_dim(data: BatchedDataDict[Any], *, skip_keys: Collection[str] | None = None) -> tuple[int, int]:
    """Return `(1, S)`: the sequence dimension and its length, taken from `input_ids [B, S]`.

    Raises `BatchError` unless all tensors of at least two dimensions, except those in `skip_keys`, have length S there.
    """
    if isinstance(skip_keys, str):
        raise BatchTypeError(f"skip_keys must be a list of keys, got {skip_keys!r}")
    width, skipped = check_tokens(data).shape[1], frozenset(skip_keys or ())
    for key, value in data.items():
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] != width and key not in skipped:
            raise BatchError(
                f"Dim 1 must be the sequence dim, expected dim 1={width} as in input_ids, but {key!r} is "
                f"{describe(value)}: pad it on the right, or add it to skip_keys"
            )
    return 1, width


def read_mask(batch: BatchedDataDict[Any], key: str, ndim: int) -> Tensor | None:
    """Return `batch[key]`, None if absent; raise `BatchError` unless it is a tensor of `ndim` dimensions, 1 or 2.

    Its shape must match `input_ids [B, S]` or, without `input_ids`, the number of rows of `batch`. Does not read
    values.
    """
    mask = batch.get(key)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != ndim or mask.is_complex():
        raise BatchError(f"{key} must be a tensor {('[B]', '[B, S]')[ndim - 1]} of real numbers, got {describe(mask)}")
    input_ids = batch.get("input_ids")
    known = input_ids.shape[:ndim] if isinstance(input_ids, Tensor) else (batch.size,)
    if mask.shape[: len(known)] != known:
        allowed = ", ".join(map(str, [*known, "S"][:ndim]))
        raise BatchError(f"{key} must have the shape [{allowed}] to match the rows, got {describe(mask)}")
    return mask


def _all_targets(batch: BatchedDataDict[Any]) -> Tensor:
    """Return `[B]`: the number of tokens of each row, except its first."""
    input_ids = check_tokens(batch)
    count, width = input_ids.shape
    if "input_lengths" not in batch:
        return torch.full((count,), max(width - 1, 0), dtype=torch.float32, device=input_ids.device)
    lengths: Tensor = batch["input_lengths"].to(torch.int64)  # so that lengths - 1 does not wrap around in uint8
    if lengths.device.type == "cpu":
        read_lengths(lengths, width)
    return (lengths - 1).clamp(min=0).to(torch.float32)


def _value(member: Any) -> Any:
    """Return the value of an enum member: NeMo-RL's loss types are another enum with the same values."""
    return getattr(member, "value", member)


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
    needed = {"token_mask": ("token_mask",), "loss": ("token_mask", "sample_mask"), "loss_last": ("sample_mask",)}
    if positions == "all":
        long_enough: Tensor = data["input_lengths"] > 1
        return long_enough
    if not isinstance(positions, str) or positions not in needed:
        raise BatchError(f"unknown positions {positions!r}; use 'all', 'token_mask', 'loss', 'last' or 'loss_last'")
    for key in needed[positions]:
        if key not in data:
            raise BatchError(
                f"{key} must be present in the data for positions={positions!r}; it has {sorted(data, key=str)}"
            )
    if positions == "loss_last":
        counted: Tensor = (data["input_lengths"] > 0) & (data["sample_mask"] != 0)
        return counted
    wanted: Tensor = data["token_mask"][:, 1:].bool().any(dim=1)
    return wanted if positions == "token_mask" else wanted & (data["sample_mask"] != 0)


def rows_to_plan(data: BatchedDataDict[Any], positions: str, *, groups: bool) -> RowsToPlan:
    """Return the rows of `data` that have one of the `positions`, with `groups` and the others of their groups."""
    wanted = rows_with_targets(data, positions)
    if not groups:
        return RowsToPlan(data, wanted)
    return RowsToPlan(data, with_whole_groups(wanted, data), read_group_ids(data))


def read_group_ids(data: BatchedDataDict[Any]) -> Tensor:
    """Return `group_ids [B]`; raise `BatchError` unless they are integers, one for each row."""
    ids = data.get(GROUP_IDS)
    if ids is None:
        raise BatchKeyError(
            f"{GROUP_IDS} must be present in the data, as the loss needs groups of rows (needs_groups); it has "
            f"{sorted(data, key=str)}"
        )
    if not is_integral(ids) or ids.shape != (data.size,):
        raise BatchTypeError(f"{GROUP_IDS} must be a tensor [B] = [{data.size}] of integers, got {describe(ids)}")
    return ids


def with_whole_groups(wanted: Tensor, data: BatchedDataDict[Any]) -> Tensor:
    """Return `[B]` bool: the rows of groups with at least one `wanted [B]` row.

    Raises `BatchError` if such a group has a row without tokens, which no model can compute.
    """
    ids = read_group_ids(data)
    found, group = ids.unique(return_inverse=True)
    kept = torch.zeros(len(found), dtype=torch.bool, device=ids.device)
    kept[group[wanted]] = True
    rows = kept[group]
    empty = rows & (data["input_lengths"] == 0)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise BatchError(
            f"row {row} of group {int(ids[row])} has no tokens; give it at least one, or set the sample_mask of the "
            "whole group to 0"
        )
    return rows


def check_planned(microbatches: Sequence[Tensor], ids: Tensor) -> None:
    """Raise `BatchError` unless each group of `ids [B]` is in one of the planned `microbatches` of rows."""
    sizes = torch.tensor([len(rows) for rows in microbatches], dtype=torch.int64)
    microbatch = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    rows = torch.cat([*microbatches, sizes[:0]])
    pairs = torch.stack((ids[rows].to("cpu", torch.int64), microbatch)).unique(dim=1)[0]
    divided = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(divided):
        raise BatchError(
            f"group {int(divided[0])} is divided over several planned microbatches, but the loss needs whole groups; "
            f"plan them with group_ids_key={GROUP_IDS!r}"
        )
