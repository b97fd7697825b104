"""The default data processor: splits a worker's rows, text or multimodal, into microbatches of any batching mode.

NeMo-RL's functions for the same purpose are in `nemo_rl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import TOKEN_TYPES, BatchedDataDict
from rlframework.batch.packed_tensor import has_media
from rlframework.interfaces.data_processor import (
    Batching,
    BatchPlan,
    DataProcessor,
    GlobalBatch,
    Microbatch,
    MicrobatchRule,
    RowsToPlan,
)
from rlframework.policy.microbatches.global_batch import check_planned, process_global_batch, real_tokens, rows_to_plan
from rlframework.policy.microbatches.model_inputs import packed_inputs, padded_inputs
from rlframework.policy.microbatches.on_demand import Made, on_device
from rlframework.policy.microbatches.shapes import NO_PADDING, Padding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlframework.interfaces.loss import LossFunction


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
        batching = self.batching(plan.mode)
        groups = rows_by_microbatch(rows_to_plan(data, positions, groups=plan.groups), batching, plan, rule)
        if problem := batching.fits(data, rule):
            raise BatchError(problem)

        def make(index: int) -> Microbatch:
            return batching.make(data, groups[index], plan, rule, positions)

        return on_device(Made(len(groups), make), device)


def rows_by_microbatch(
    rows: RowsToPlan, batching: Batching, limits: BatchPlan, rule: MicrobatchRule
) -> list[torch.Tensor]:
    """Return the rows that are computed, by microbatch: as the driver has planned, or else as `batching` plans."""
    plan = rows.data.plan
    if plan is None or plan.micro_batch_indices is None or not batching.keeps_plan(limits):
        batching.check(rows, limits, rule)
        return batching.plan(rows, limits, rule).microbatches()
    groups = plan.microbatches()
    if rows.group_ids is not None:
        check_planned(groups, rows.group_ids)
    return [computed for group in groups if len(computed := group[rows.wanted[group]])]


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


def make_dummy(data: BatchedDataDict[Any], make: Callable[[BatchedDataDict[Any], Tensor], Microbatch]) -> Microbatch:
    """Make a microbatch that contributes nothing: the shortest row of `data`, or one token if all rows are empty.

    `make(data, rows)` makes a microbatch of rows with the positions "all".
    """
    lengths = data["input_lengths"]
    shortest = int(lengths.masked_fill(lengths == 0, torch.iinfo(lengths.dtype).max).argmin())
    row = data.slice(shortest, shortest + 1)
    row["input_lengths"] = row["input_lengths"].clamp(min=1)
    microbatch = make(row, torch.tensor([0]))
    microbatch.is_dummy = True
    return microbatch
