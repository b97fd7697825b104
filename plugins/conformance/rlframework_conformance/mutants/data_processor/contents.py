"""Mutants of what the model and the head receive, and of global batches: wrong rows and wrong counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from rlframework.interfaces.data_processor import DataProcessor
from rlframework_conformance.mutants.mutant import around, entries, mutant


def in_each_microbatch(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Decorate a change of each microbatch: it becomes `change(microbatch, data)`."""
    return around(DataProcessor.microbatches)(
        lambda sound, _, data, *args, **how: [change(each, data) for each in sound(data, *args, **how)]
    )


def batch_with(data: Any, *, planned: bool = True, **values: Any) -> Any:
    """Return a copy of `data` with `values` replaced, and the driver's plan of microbatches if `planned`."""
    changed = type(data)({**data, **values})
    changed.__dict__.update({name: value for name, value in data.__dict__.items() if name != "data"})
    if not planned:
        changed.micro_batch_indices = changed.micro_batch_lengths = None
    return changed


def _inputs(microbatch: Any, **values: Any) -> Any:
    return replace(microbatch, processed_inputs=replace(microbatch.processed_inputs, **values))


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


@mutant("first_batch_again", "Every global batch is the first one.")
@around(DataProcessor.process_global_batch)
def _always_first_batch(sound: Any, _: Any, *args: Any, batch_idx: int, **where: Any) -> Any:
    return sound(*args, batch_idx=0, **where)


@mutant("dealt_batches_cut_evenly", "Shards with uneven numbers of rows per global batch are sliced by the batch size.")
@around(DataProcessor.process_global_batch)
def _sliced_by_batch_size(sound: Any, _: Any, data: Any, *args: Any, **where: Any) -> Any:
    plain = batch_with(data, planned=False)
    plain.elem_counts_per_gb = None
    return sound(plain, *args, **where)


@mutant("counts_of_this_rank", "Each rank divides by the counts of its own rows.")
@around(DataProcessor.process_global_batch)
def _this_rank_only(sound: Any, _: Any, data: Any, loss_fn: Any, dp_group: Any, **where: Any) -> Any:
    return sound(data, loss_fn, None, **where)


@mutant("masks_made_up", "A missing `sample_mask` is replaced by ones.")
@around(DataProcessor.process_global_batch)
def _missing_mask_is_ones(sound: Any, _: Any, data: Any, *args: Any, **where: Any) -> Any:
    ones = torch.ones(len(data["input_ids"]))
    return sound(batch_with(data, sample_mask=data.get("sample_mask", ones)), *args, **where)


def _each_count(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Break each of the counts that losses divide by: it becomes `change(count)`."""
    names = ("global_valid_seqs", "global_valid_toks")
    return entries(DataProcessor.process_global_batch, lambda counts: {name: change(counts[name]) for name in names})


def _tokens(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Break the number of valid tokens, which becomes `change(batch)`."""
    return entries(DataProcessor.process_global_batch, lambda counts: {"global_valid_toks": change(counts["batch"])})


MUTANTS = (
    mutant("first_token_counted", "The first token of a row is counted, although nothing predicts it.")(
        _tokens(lambda batch: (batch["token_mask"].sum(1) * batch["sample_mask"]).sum())
    ),
    mutant("masked_rows_counted", "Tokens of rows whose `sample_mask` is 0 are counted.")(
        _tokens(lambda batch: batch["token_mask"][:, 1:].sum())
    ),
    mutant(
        "counts_never_zero", "A batch without valid tokens has a count of 1, so the optimizer steps on an empty batch."
    )(_each_count(lambda count: count.clamp(min=1))),
    mutant("counts_are_integers", "The counts are int64.")(_each_count(lambda count: count.long())),
    mutant("rows_in_bin_order", "`rows` lists the rows in another order than the microbatch holds them.")(
        in_each_microbatch(lambda microbatch, data: replace(microbatch, rows=microbatch.rows.flip(0)))
    ),
    mutant("scatter_at_the_position", "Log-probabilities are placed one position too far left.")(
        in_each_microbatch(lambda microbatch, data: replace(microbatch, scatter=microbatch.scatter - 1))
    ),
)
