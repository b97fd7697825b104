"""The default data processor: a worker's rows become padded, dynamic or packed microbatches, text or multimodal.

All index work is vectorised; each row's tokens are copied once, or not at all where rows already lie side by side.
NeMo-RL's functions for the same, which take its dictionaries, are in `processing` and can be imported from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.data.global_batch import check_tokens, process_global_batch, read_mask
from rlframework.data.model_inputs import pack_sequences, packed_inputs, padded_inputs, unpack_tensor
from rlframework.data.packing import balanced_microbatches, get_packer
from rlframework.data.processing import (
    get_microbatch_iterator,
    make_processed_microbatch_iterator,
    process_microbatch,
)
from rlframework.errors import BatchError, BatchKeyError
from rlframework.interfaces.data_processor import (
    BatchPlan,
    DataProcessor,
    Microbatch,
    MicrobatchRule,
    ProcessedInputs,
    ProcessedMicrobatch,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlframework.distributed.batched_data_dict import BatchedDataDict
    from rlframework.interfaces.loss import LossFunction

__all__ = [
    "MicrobatchProcessor",
    "ProcessedInputs",
    "ProcessedMicrobatch",
    "check_rows",
    "check_sequence_dim",
    "get_microbatch_iterator",
    "group_rows",
    "make_microbatch",
    "make_processed_microbatch_iterator",
    "pack_sequences",
    "process_global_batch",
    "process_microbatch",
    "rows_with_targets",
    "to_device",
    "unpack_tensor",
]


class MicrobatchProcessor(DataProcessor):
    """Rows of tokens, and what comes with them, for any causal language model."""

    def process_global_batch(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        dp_group: ProcessGroup | None,
        *,
        batch_idx: int,
        batch_size: int | None,
    ) -> dict[str, Any]:
        """See `DataProcessor.process_global_batch`."""
        return process_global_batch(data, loss_fn, dp_group, batch_idx=batch_idx, batch_size=batch_size)

    def microbatches(
        self, data: BatchedDataDict[Any], plan: BatchPlan, rule: MicrobatchRule, *, positions: str, device: torch.device
    ) -> Sequence[Microbatch]:
        """See `DataProcessor.microbatches`."""
        check_rows(data)
        packed = plan.mode == "packed"
        return [
            to_device(
                make_microbatch(data, rows, packed=packed, positions=positions, pad_multiple=rule.pad_multiple), device
            )
            for rows in grouped_rows(data, plan, rows_with_targets(data, positions))
        ]


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


def check_rows(data: BatchedDataDict[Any]) -> None:
    """`BatchError` unless `data` holds rows that can be trained on or scored, whatever else it holds.

    `input_ids [B, S]`, `input_lengths [B]` whole numbers from 0 to S, and where they are there `sample_mask [B]` and
    `token_mask [B, S]`, which is 0 on padding. All tensors of more dimensions have dimension 1 in common.
    """
    check_tokens(data)
    for key, dimensions in (("token_mask", 2), ("sample_mask", 1)):
        read_mask(data, key, dimensions)
    if "input_lengths" not in data:
        raise BatchKeyError(f"input_lengths must be present in the data; it has {sorted(data)}")
    width, lengths = check_sequence_dim(data), data["input_lengths"]
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise BatchError(f"input_lengths must be whole numbers, not {lengths.dtype}")
    wrong = ((lengths < 0) | (lengths > width)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(
            f"row {row} has input_lengths {int(lengths[row])}; the columns of input_ids allow 0 to {width}"
        )
    if len(lengths) and not bool((lengths > 0).any()):
        raise BatchError(f"none of the {len(lengths)} rows has a token: input_lengths are all 0")
    if "token_mask" in data:
        stray = ((data["token_mask"] != 0) & ~_real(data)).nonzero()
        if len(stray):
            row, column = stray[0].tolist()
            raise BatchError(
                f"token_mask of row {row} is set at position {column}, which is padding: the row has "
                f"{int(lengths[row])} tokens. Set it to 0 there"
            )


def rows_with_targets(data: BatchedDataDict[Any], positions: str) -> Tensor:
    """`[B]` bool: the rows that are any work at `positions`; `BatchError` if that is not all, token_mask or loss."""
    if positions == "all":
        long_enough: Tensor = data["input_lengths"] > 1
        return long_enough
    if positions not in ("token_mask", "loss"):
        raise BatchError(f"positions is {positions!r}; take 'all', 'token_mask' or 'loss'")
    for key in ("token_mask", "sample_mask")[: 1 if positions == "token_mask" else 2]:
        if key not in data:
            raise BatchError(f"{key} must be present in the data for positions={positions!r}; it has {sorted(data)}")
    wanted: Tensor = (data["token_mask"][:, 1:] != 0).any(dim=1)
    return wanted if positions == "token_mask" else wanted & (data["sample_mask"] != 0)


def _real(data: BatchedDataDict[Any]) -> Tensor:
    """`[B, S]` bool: what is no padding."""
    input_ids = data["input_ids"]
    real: Tensor = torch.arange(input_ids.shape[1], device=input_ids.device) < data["input_lengths"][:, None]
    return real


def grouped_rows(data: BatchedDataDict[Any], plan: BatchPlan, wanted: Tensor) -> list[Tensor]:
    """The rows of `data` for which `wanted [B]` holds, by microbatch.

    The groups are those that the driver has planned, where `data` carries them; else `plan` makes them.
    """
    if data.micro_batch_indices is None or plan.mode == "padded":
        rows = wanted.nonzero()[:, 0]
        return [rows[group] for group in group_rows(data["input_lengths"][rows].tolist(), plan)]
    groups, offset = [], 0
    for ranges in data.micro_batch_indices:
        for start, end in ranges:
            groups.append(wanted[offset + start : offset + end].nonzero()[:, 0] + offset + start)
        offset += max((end for _, end in ranges), default=0)
    return [rows for rows in groups if len(rows)]


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
    if not lengths:
        return []
    if plan.mode == "dynamic":
        return balanced_microbatches(lengths, plan.tokens)[0]
    return get_packer("balanced", plan.tokens).pack(lengths)


def make_microbatch(
    data: BatchedDataDict[Any], rows: Tensor, *, packed: bool, positions: str, pad_multiple: int = 1
) -> Microbatch:
    """The microbatch of `rows [b]` of `data`, on the device of `data`. See `Microbatch` for the fields."""
    part = _rows_of(data, rows)
    input_ids, lengths = part["input_ids"], part["input_lengths"]
    width = input_ids.shape[1]
    row, column = _wanted_targets(part, positions).nonzero(as_tuple=True)
    bounds = None
    if packed:
        if media := part.get_multimodal_dict():  # by keys: other ranks may have media where these rows have none
            raise BatchError(
                f"multimodal rows ({sorted(media)}) cannot be packed; set policy.batching.mode to dynamic or padded"
            )
        inputs, bounds = packed_inputs(input_ids, lengths, pad_multiple)
        head_positions = bounds[row] + column - 1
    else:
        inputs = padded_inputs(input_ids, pad_multiple)
        head_positions = row * inputs.seq_len + column - 1
        if media := part.get_multimodal_dict(as_tensors=True):  # the model places text and media itself
            inputs.vlm_kwargs, inputs.position_ids = media, None
    return Microbatch(
        data_dict=part,
        processed_inputs=inputs,
        original_batch_size=len(rows),
        original_seq_len=width,
        rows=rows,
        head_positions=head_positions,
        targets=input_ids[row, column],
        scatter=row * width + column,
        cu_seqlens=None if bounds is None else bounds.cpu(),
    )


def _rows_of(data: BatchedDataDict[Any], rows: Tensor) -> BatchedDataDict[Any]:
    """`rows` of `data`, cut to the longest of them: views where they lie side by side, else one copy."""
    full_width, width = data["input_ids"].shape[1], int(data["input_lengths"][rows].max())
    cut = type(data)(
        {
            key: value[:, :width]
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == full_width
            else value
            for key, value in data.items()
        }
    )
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1 and bool((rows.diff() == 1).all()):
        return cut.slice(first, last + 1)
    return cut.select_indices(rows)


def _wanted_targets(rows: BatchedDataDict[Any], positions: str) -> Tensor:
    """`[b, S']` bool: the tokens whose log-probability is wanted; never position 0, never padding."""
    wanted = _real(rows)
    wanted[:, :1] = False
    return wanted if positions == "all" else wanted & (rows["token_mask"] != 0)


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Move the tensors of `microbatch` but `rows` and `cu_seqlens`, in place; on the CPU nothing is copied."""
    if device.type == "cpu":
        return microbatch
    for name in ("head_positions", "targets", "scatter"):
        setattr(microbatch, name, getattr(microbatch, name).to(device, non_blocking=True))
    inputs = microbatch.processed_inputs
    inputs.input_ids = inputs.input_ids.to(device, non_blocking=True)
    if inputs.position_ids is not None:
        inputs.position_ids = inputs.position_ids.to(device, non_blocking=True)
    inputs.vlm_kwargs = {name: value.to(device, non_blocking=True) for name, value in inputs.vlm_kwargs.items()}
    microbatch.data_dict.to(device)
    return microbatch
