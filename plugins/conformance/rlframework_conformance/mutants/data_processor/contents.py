"""Mutants of the contents of a microbatch: what the model and the head receive."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from rlframework_conformance.mutants.data_processor.changes import in_each_microbatch
from rlframework_conformance.mutants.mutant import mutant


def _inputs(microbatch: Any, **values: Any) -> Any:
    return replace(microbatch, processed_inputs=replace(microbatch.processed_inputs, **values))


@mutant("rows_in_bin_order", "`rows` lists the rows in another order than the microbatch holds them.")
@in_each_microbatch
def _bin_order(microbatch: Any, data: Any) -> Any:
    return replace(microbatch, rows=microbatch.rows.flip(0))


@mutant("as_wide_as_the_batch", "Microbatches are padded to the longest row of the whole batch.")
@in_each_microbatch
def _padded_to_the_batch_width(microbatch: Any, data: Any) -> Any:
    inputs, width = microbatch.processed_inputs, data["input_ids"].shape[1]
    padding = width - inputs.seq_len
    if microbatch.cu_seqlens is not None or padding <= 0:
        return microbatch
    positions = microbatch.head_positions // inputs.seq_len * width + microbatch.head_positions % inputs.seq_len
    ids = torch.nn.functional.pad(inputs.input_ids, (0, padding))
    return replace(_inputs(microbatch, input_ids=ids, seq_len=width, position_ids=None), head_positions=positions)


@mutant("positions_run_through", "Position ids do not restart at 0 for each packed sequence.")
@in_each_microbatch
def _positions_not_restarted(microbatch: Any, data: Any) -> Any:
    positions = microbatch.processed_inputs.position_ids
    if microbatch.cu_seqlens is None:
        return microbatch
    return _inputs(microbatch, position_ids=torch.arange(positions.shape[1], device=positions.device)[None])


@mutant("packed_backwards", "Sequences are packed in another order than `rows` and `cu_seqlens` state.")
@in_each_microbatch
def _packed_in_reverse(microbatch: Any, data: Any) -> Any:
    if microbatch.cu_seqlens is None:
        return microbatch
    bounds = microbatch.cu_seqlens.tolist()
    ids = microbatch.processed_inputs.input_ids[0]
    sequences = [ids[start:end] for start, end in pairwise(bounds)]
    return _inputs(microbatch, input_ids=torch.cat(sequences[::-1])[None])


@mutant("bounds_one_off", "`cu_seqlens` is one too low, so each sequence sees the last token of the previous one.")
@in_each_microbatch
def _bounds_one_off(microbatch: Any, data: Any) -> Any:
    bounds = microbatch.cu_seqlens
    return microbatch if bounds is None else replace(microbatch, cu_seqlens=(bounds - 1).clamp(min=0))


@mutant("last_bound_missing", "`cu_seqlens` lacks the end of the last packed sequence.")
@in_each_microbatch
def _last_bound_missing(microbatch: Any, data: Any) -> Any:
    bounds = microbatch.cu_seqlens
    return microbatch if bounds is None else replace(microbatch, cu_seqlens=bounds[: len(microbatch.rows)])


@mutant("targets_off_by_one", "The target at each position is the token at that position, not the next one.")
@in_each_microbatch
def _targets_off_by_one(microbatch: Any, data: Any) -> Any:
    ids = microbatch.processed_inputs.input_ids.flatten()
    return replace(microbatch, targets=ids[microbatch.head_positions])


@mutant("head_at_the_target", "The head runs at the target's own position and so sees the target.")
@in_each_microbatch
def _head_at_the_target(microbatch: Any, data: Any) -> Any:
    last = microbatch.processed_inputs.input_ids.numel() - 1
    return replace(microbatch, head_positions=(microbatch.head_positions + 1).clamp(max=last))


@mutant("scatter_at_the_position", "Log-probabilities are placed one position too far left.")
@in_each_microbatch
def _scatter_at_the_position(microbatch: Any, data: Any) -> Any:
    return replace(microbatch, scatter=microbatch.scatter - 1)
