"""The default data processor: splits a worker's rows, text or multimodal, into padded, dynamic or packed microbatches.

All index arithmetic is vectorized. Each row's tokens are copied at most once, and not at all if the rows of a
microbatch are consecutive. NeMo-RL's functions for the same purpose are in `nemo_rl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import TOKEN_TYPES
from rlframework.batch.packed_tensor import has_media
from rlframework.batch.packing import balanced_microbatches, get_packer
from rlframework.interfaces.data_processor import BatchPlan, DataProcessor, GlobalBatch, Microbatch, MicrobatchRule
from rlframework.policy.microbatches.global_batch import (
    check_fits,
    process_global_batch,
    real_tokens,
    rows_with_targets,
)
from rlframework.policy.microbatches.model_inputs import packed_inputs, padded_inputs
from rlframework.policy.microbatches.on_demand import Made, on_device
from rlframework.policy.microbatches.row_groups import (
    check_groups_fit,
    check_planned,
    read_group_ids,
    with_whole_groups,
)
from rlframework.policy.microbatches.shapes import Padding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlframework.batch.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.loss import LossFunction

NO_PADDING = Padding()


class MicrobatchProcessor(DataProcessor):
    """Makes microbatches of token rows and their accompanying values, for any causal language model."""

    def process_global_batch(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        dp_group: ProcessGroup | None,
        *,
        batch_idx: int,
        batch_size: int | None,
    ) -> GlobalBatch:
        """See `DataProcessor.process_global_batch`."""
        return process_global_batch(data, loss_fn, dp_group, batch_idx=batch_idx, batch_size=batch_size)

    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, rule: MicrobatchRule, *, positions: str, device: torch.device
    ) -> Sequence[Microbatch]:
        """See `DataProcessor.microbatches`."""
        packed, padding = plan.mode == "packed", Padding.of(plan, rule)
        groups = rows_by_microbatch(data, plan, rows_with_targets(data, positions), padding)
        if packed and not rule.packs_media:
            _require_text(data)

        def make(index: int) -> Microbatch:
            return make_microbatch(data, groups[index], packed=packed, positions=positions, padding=padding)

        return on_device(Made(len(groups), make), device)


def rows_by_microbatch(
    data: BatchedDataDict[Any], plan: BatchPlan, wanted: Tensor, padding: Padding = NO_PADDING
) -> list[Tensor]:
    """Return the rows of `data` for which `wanted [B]` is true, by microbatch.

    Uses the microbatches that the driver planned if `data` carries them, otherwise groups the rows by `plan`. With
    `plan.groups`, all rows of a group are returned if one of them is wanted.
    """
    ids = None
    if plan.groups:
        ids, wanted = read_group_ids(data), with_whole_groups(wanted, data)
    if data.micro_batch_indices is None or (plan.mode == "padded" and ids is None):
        rows = wanted.nonzero()[:, 0]
        own = None if ids is None else ids[rows]
        return [rows[group] for group in group_rows(data["input_lengths"][rows].tolist(), plan, padding, own)]
    groups, offset = [], 0
    for ranges in data.micro_batch_indices:
        if ids is not None:
            check_planned(ranges, ids[offset:])
        for start, end in ranges:
            groups.append(wanted[offset + start : offset + end].nonzero()[:, 0] + offset + start)
        offset += max((end for _, end in ranges), default=0)
    return [rows for rows in groups if len(rows)]


def group_rows(
    lengths: Sequence[int], plan: BatchPlan, padding: Padding = NO_PADDING, ids: Tensor | None = None
) -> list[list[int]]:
    """Return indices into `lengths`, grouped into microbatches by `plan`; rows with equal `ids` share one.

    No dynamic or packed group exceeds `plan.tokens`, including its padding.
    """
    if not lengths:
        return []
    exact = padding if ids is None else replace(padding, few=False)
    widths = [exact.width(length) for length in lengths] if plan.mode == "dynamic" else lengths
    limit = plan.rows if plan.mode == "padded" else plan.tokens
    if plan.mode != "padded":
        check_fits(padding.width(max(lengths)), plan.mode, limit)
    if plan.mode == "packed":
        limit -= limit % padding.multiple
    if ids is not None:
        check_groups_fit(ids, widths, plan.mode, limit)
    if plan.mode == "padded":
        return get_packer("concatenative", limit).pack([1] * len(lengths), ids)
    if plan.mode == "dynamic":
        return balanced_microbatches(widths, limit, group_ids=ids)[0]
    return get_packer("balanced", limit).pack(lengths, ids)


def make_microbatch(
    data: BatchedDataDict[Any], rows: Tensor, *, packed: bool, positions: str, padding: Padding = NO_PADDING
) -> Microbatch:
    """Make a `Microbatch` of `rows [b]` of `data`, on the device of `data`."""
    selected = _select_rows(data, rows)
    lengths = selected["input_lengths"].to(torch.int64)
    real = real_tokens(selected)
    input_ids = selected["input_ids"].to(torch.int64).where(real, 0)  # padding need not contain valid token ids
    width = input_ids.shape[1]
    row, column = wanted_targets(selected, real, positions).nonzero(as_tuple=True)
    before = 0 if positions in ("last", "loss_last") else 1  # the token that predicts the target
    multimodal, bounds = has_media(selected), None
    if packed:
        inputs, bounds = packed_inputs(input_ids, lengths, padding.packed(int(lengths.sum())))
        head_positions = bounds[row] + column - before
        if multimodal:
            inputs.vlm_kwargs = packed_media(selected, real, inputs.seq_len)
    else:
        inputs = padded_inputs(_pad_rows(input_ids, replace(padding, few=False) if multimodal else padding))
        head_positions = row * inputs.seq_len + column - before
        if multimodal:  # the model computes the positions of text and media
            inputs.vlm_kwargs, inputs.position_ids = selected.get_multimodal_dict(as_tensors=True), None
    return Microbatch(
        data_dict=selected,
        processed_inputs=inputs,
        original_batch_size=len(rows),
        original_seq_len=width,
        rows=rows,
        head_positions=head_positions,
        targets=input_ids[row, column],
        scatter=row * width + column,
        cu_seqlens=None if bounds is None else bounds.cpu(),
    )


def packed_media(rows: BatchedDataDict[Any], real: Tensor, length: int) -> dict[str, Tensor]:
    """Return the media of `rows`, joined, and types of their `real` tokens for a packed row: `[1, length]`."""
    media = rows.get_multimodal_dict(as_tensors=True)
    for key in media.keys() & TOKEN_TYPES:
        types = media[key].masked_select(real)
        media[key] = pad(types, (0, length - len(types)))[None]
    return media


def _require_text(data: BatchedDataDict[Any]) -> None:
    if has_media(data):
        raise BatchError(
            f"multimodal rows ({sorted(data.get_multimodal_dict())}) cannot be packed; set policy.batching.mode to "
            "dynamic or padded"
        )


def _pad_rows(input_ids: Tensor, padding: Padding) -> Tensor:
    """Pad `[b, S']` to `[n, L]`."""
    rows, longest = input_ids.shape
    width = padding.width(longest, rows)
    added = padding.rows(rows, width) - rows
    return pad(input_ids, (0, width - longest, 0, added)) if added or width > longest else input_ids


def _select_rows(data: BatchedDataDict[Any], rows: Tensor) -> BatchedDataDict[Any]:
    """Return `rows` of `data`, truncated to the longest of them: as views if they are consecutive, else as one copy."""
    full_width, width = data["input_ids"].shape[1], int(data["input_lengths"][rows].max())
    truncated = type(data)(
        {
            key: value[:, :width]
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == full_width
            else value
            for key, value in data.items()
        }
    )
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1 and bool((rows.diff() == 1).all()):
        return truncated.slice(first, last + 1)
    return truncated.select_indices(rows)


def wanted_targets(rows: BatchedDataDict[Any], real: Tensor, positions: str) -> Tensor:
    """Return `[b, S']` bool: the tokens to score, never at position 0; or the last token of each row."""
    if positions in ("last", "loss_last"):
        last: Tensor = torch.arange(real.shape[1], device=real.device) == rows["input_lengths"][:, None] - 1
        return last if positions == "last" else last & (rows["sample_mask"] != 0)[:, None]
    wanted = real.clone() if positions == "all" else real & (rows["token_mask"] != 0)
    if positions == "loss":  # a masked row is here only for its group
        wanted &= (rows["sample_mask"] != 0)[:, None]
    wanted[:, :1] = False
    return wanted


def make_dummy(data: BatchedDataDict[Any], *, packed: bool, padding: Padding = NO_PADDING) -> Microbatch:
    """Make a microbatch that contributes nothing: the shortest row of `data`, or one token if all rows are empty."""
    lengths = data["input_lengths"]
    shortest = int(lengths.masked_fill(lengths == 0, torch.iinfo(lengths.dtype).max).argmin())
    row = data.slice(shortest, shortest + 1)
    row["input_lengths"] = row["input_lengths"].clamp(min=1)
    microbatch = make_microbatch(row, torch.tensor([0]), packed=packed, positions="all", padding=padding)
    microbatch.is_dummy = True
    return microbatch
