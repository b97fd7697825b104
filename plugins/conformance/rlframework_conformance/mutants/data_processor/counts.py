"""Mutants of global batches: wrong rows and wrong counts."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.interfaces.data_processor import DataProcessor
from rlframework_conformance.mutants.data_processor.changes import batch_with
from rlframework_conformance.mutants.mutant import around, mutant


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


@mutant("first_token_counted", "The first token of a row is counted, although nothing predicts it.")
@around(DataProcessor.process_global_batch)
def _first_token_counted(sound: Any, _: Any, data: Any, *args: Any, **where: Any) -> Any:
    counts = sound(data, *args, **where)
    batch = counts["batch"]
    return counts | {"global_valid_toks": (batch["token_mask"].sum(1) * batch["sample_mask"]).sum()}


@mutant("masked_rows_counted", "Tokens of rows whose `sample_mask` is 0 are counted.")
@around(DataProcessor.process_global_batch)
def _masked_rows_counted(sound: Any, _: Any, data: Any, *args: Any, **where: Any) -> Any:
    counts = sound(data, *args, **where)
    return counts | {"global_valid_toks": counts["batch"]["token_mask"][:, 1:].sum()}


@mutant("counts_of_this_rank", "Each rank divides by the counts of its own rows.")
@around(DataProcessor.process_global_batch)
def _this_rank_only(sound: Any, _: Any, data: Any, loss_fn: Any, dp_group: Any, **where: Any) -> Any:
    return sound(data, loss_fn, None, **where)


@mutant("counts_never_zero", "A batch without valid tokens has a count of 1, so the optimizer steps on an empty batch.")
@around(DataProcessor.process_global_batch)
def _never_zero(sound: Any, _: Any, *args: Any, **where: Any) -> Any:
    counts = sound(*args, **where)
    return {name: value.clamp(min=1) if name.startswith("global_valid") else value for name, value in counts.items()}


@mutant("counts_are_integers", "The counts are int64.")
@around(DataProcessor.process_global_batch)
def _integer_counts(sound: Any, _: Any, *args: Any, **where: Any) -> Any:
    counts = sound(*args, **where)
    return {name: value.long() if name.startswith("global_valid") else value for name, value in counts.items()}


@mutant("masks_made_up", "A missing `sample_mask` is replaced by ones.")
@around(DataProcessor.process_global_batch)
def _missing_mask_is_ones(sound: Any, _: Any, data: Any, *args: Any, **where: Any) -> Any:
    ones = torch.ones(len(data["input_ids"]))
    return sound(batch_with(data, sample_mask=data.get("sample_mask", ones)), *args, **where)
