"""The default data processor: a worker's rows become padded, dynamic or packed microbatches.

All index work is vectorised; each row's tokens are copied once. Left out until the data room is complete: multimodal
inputs, the other packers, context-parallel buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.errors import BatchError
from rlframework.interfaces.data_processor import BatchPlan, DataProcessor, Microbatch, MicrobatchRule

if TYPE_CHECKING:
    from rlframework.distributed.batched_data_dict import BatchedDataDict


def check_sequence_dim(data: BatchedDataDict[Any]) -> int:
    """Length `S` of dimension 1, which all tensors of two and more dimensions share; else `BatchError`."""
    width = int(data["input_ids"].shape[1])
    for key, value in data.items():
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] != width:
            raise BatchError(
                f"Dim 1 must be the sequence: {key!r} has shape {tuple(value.shape)}, but input_ids has {width} "
                f"columns. Pad {key!r} on the right to {width}."
            )
    return width


def group_rows(lengths: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """Indices into `lengths`, grouped into microbatches by `plan`. No dynamic or packed group exceeds `plan.tokens`."""
    if plan.mode == "padded":
        return [list(range(start, min(start + plan.rows, len(lengths)))) for start in range(0, len(lengths), plan.rows)]
    if plan.mode not in ("dynamic", "packed"):
        raise BatchError(f"batching mode {plan.mode!r} is unknown; take padded, dynamic or packed")
    longest = max(lengths, default=0)
    if longest > plan.tokens:
        raise BatchError(
            f"a row has {longest} tokens, but a {plan.mode} microbatch may have {plan.tokens}; "
            f"raise policy.batching.tokens or shorten the rows"
        )
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return (
        _by_padded_size(lengths, order, plan.tokens)
        if plan.mode == "dynamic"
        else _first_fit(lengths, order, plan.tokens)
    )


def _by_padded_size(lengths: Sequence[int], order: list[int], tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for row in order:  # longest first, so the first row of a group is its width
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _first_fit(lengths: Sequence[int], order: list[int], tokens: int) -> list[list[int]]:
    """First fit, longest first; so rows of one length stand side by side in a bin, which attention makes use of."""
    groups: list[list[int]] = []
    room: list[int] = []
    for row in order:
        length = lengths[row]
        index = next((i for i, free in enumerate(room) if free >= length), None)
        if index is None:
            groups.append([row])
            room.append(tokens - length)
        else:
            groups[index].append(row)
            room[index] -= length
    return groups


def _wanted_targets(rows: BatchedDataDict[Any], lengths: Tensor, width: int, positions: str) -> Tensor:
    """`[b, S']` bool: the tokens whose log-probability is wanted; never position 0, never padding."""
    columns = torch.arange(width)
    wanted = (columns > 0) & (columns < lengths[:, None])
    return wanted if positions == "all" else wanted & (rows["token_mask"] != 0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def make_microbatch(
    data: BatchedDataDict[Any], rows: Tensor, *, packed: bool, positions: str, pad_multiple: int = 1
) -> Microbatch:
    """The microbatch of `rows [b]` of `data`, on the CPU. See `Microbatch` for the fields."""
    lengths = data["input_lengths"][rows]
    full_width, width = data["input_ids"].shape[1], int(lengths.max())
    part = type(data)(
        {
            key: (value[:, :width] if value.ndim >= 2 and value.shape[1] == full_width else value)[rows]
            if isinstance(value, Tensor)
            else [value[row] for row in rows.tolist()]
            for key, value in data.items()
        }
    )
    input_ids = part["input_ids"]
    row, column = _wanted_targets(part, lengths, width, positions).nonzero(as_tuple=True)
    common = {"data": part, "rows": rows, "targets": input_ids[row, column], "scatter": row * width + column}
    if not packed:
        length = _round_up(width, pad_multiple)
        return Microbatch(
            input_ids=torch.nn.functional.pad(input_ids, (0, length - width)) if length > width else input_ids,
            position_ids=torch.arange(length).expand(len(rows), length),
            head_positions=row * length + column - 1,
            **common,
        )
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    real = torch.arange(width) < lengths[:, None]
    total = int(starts[-1])
    tail = _round_up(total, pad_multiple) - total
    bounds = torch.cat((starts, starts[-1:] + tail)) if tail else starts
    return Microbatch(
        input_ids=torch.nn.functional.pad(input_ids[real], (0, tail))[None],
        position_ids=torch.nn.functional.pad(torch.arange(width).expand_as(real)[real], (0, tail))[None],
        head_positions=starts[row] + column - 1,
        cu_seqlens=bounds.to(torch.int32),
        **common,
    )


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Move the tensors of `microbatch` but `rows` and `cu_seqlens`, in place; on the CPU nothing is copied."""
    if device.type == "cpu":
        return microbatch
    for name in ("input_ids", "position_ids", "head_positions", "targets", "scatter"):
        setattr(microbatch, name, getattr(microbatch, name).to(device, non_blocking=True))
    microbatch.data.to(device)
    return microbatch


class MicrobatchProcessor(DataProcessor):
    """Rows of tokens for any causal language model."""

    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, rule: MicrobatchRule, *, positions: str, device: torch.device
    ) -> Sequence[Microbatch]:
        """See `DataProcessor.microbatches`."""
        check_sequence_dim(data)
        rows = torch.arange(data.size)[rows_with_targets(data, positions)]
        lengths = data["input_lengths"][rows].tolist()
        packed = plan.mode == "packed"
        return [
            to_device(
                make_microbatch(data, rows[group], packed=packed, positions=positions, pad_multiple=rule.pad_multiple),
                device,
            )
            for group in group_rows(lengths, plan)
        ]


def rows_with_targets(data: BatchedDataDict[Any], positions: str) -> Tensor:
    """`[B]` bool: the rows that are any work at `positions`; `BatchError` if that is not all, token_mask or loss."""
    if positions == "all":
        return torch.ones(data.size, dtype=torch.bool)
    if positions not in ("token_mask", "loss"):
        raise BatchError(f"positions is {positions!r}; take 'all', 'token_mask' or 'loss'")
    for key in ("token_mask", "sample_mask")[: 1 if positions == "token_mask" else 2]:
        if key not in data:
            raise BatchError(f"{key} must be present in the data for positions={positions!r}; it has {sorted(data)}")
    wanted: Tensor = (data["token_mask"][:, 1:] != 0).any(dim=1)
    return wanted if positions == "token_mask" else wanted & (data["sample_mask"] != 0)
