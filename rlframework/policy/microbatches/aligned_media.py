"""Microbatches of which some ranks have images and others have none.

FSDP and ZeRO reduce the gradients of a group of weights in one collective whose size depends on which weights have a
gradient, and ZeRO-3 also gathers each weight where a rank needs it. On a rank without images the vision tower does not
run, and ranks whose collectives differ hang or mix up gradients. So if any rank has images at a step, a microbatch
without images gets an extra row or sequence with an image: no head runs on it, and the gradients that it contributes
are zero. If no rank has images, the weights have no gradient on any rank, as in a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.interfaces.data_processor import Microbatch
from rlframework.policy.microbatches.data_processor import packed_media
from rlframework.policy.microbatches.global_batch import real_tokens
from rlframework.policy.microbatches.model_inputs import packed_inputs, padded_inputs

Rows = BatchedDataDict[Any]


def align_media(microbatches: Sequence[Microbatch], group: dist.ProcessGroup | None) -> Sequence[Microbatch]:
    """Return `microbatches` with the same kinds of media on all ranks of `group` at each step.

    All ranks pass the same number. Collective, unless `group` is None (a single rank). Media that only a dummy would
    show to the model do not count: they would give zero gradients to weights that should have none.
    """
    if group is None:
        return microbatches
    own = [set() if microbatch.is_dummy else _media(microbatch.data_dict) for microbatch in microbatches]
    ranks: list[list[set[str]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(ranks, own, group=group)
    wanted: list[set[str]] = [set().union(*steps) for steps in zip(*ranks, strict=True)]
    samples = {key: _sample(key, microbatches, ranks, wanted, group) for key in sorted(set().union(*wanted))}
    return [
        _with_media(microbatch, keys, samples) if keys != _media(microbatch.data_dict) else microbatch
        for microbatch, keys in zip(microbatches, wanted, strict=True)
    ]


def _media(rows: Rows) -> set[str]:
    """The keys under which any row has media."""
    return {key for key, value in rows.items() if isinstance(value, PackedTensor) and value.has_media}


def _sample(
    key: str,
    microbatches: Sequence[Microbatch],
    ranks: list[list[set[str]]],
    wanted: list[set[str]],
    group: dist.ProcessGroup,
) -> Rows | None:
    """Return the shortest local row with `key`; a rank that lacks one gets it from the first rank that has one."""
    has = [any(key in step for step in steps) for steps in ranks]
    needs = [any(key in all_ - step for all_, step in zip(wanted, steps, strict=True)) for steps in ranks]
    shortest = _shortest(key, microbatches) if has[dist.get_rank(group)] else None
    if any(need and not have for need, have in zip(needs, has, strict=True)):
        source = has.index(True)
        sent: list[Rows | None] = [None if shortest is None else BatchedDataDict(shortest).to("cpu")]
        dist.broadcast_object_list(sent, src=dist.get_global_rank(group, source), group=group)
        return shortest if shortest is not None else sent[0]
    return shortest


def _shortest(key: str, microbatches: Sequence[Microbatch]) -> Rows:
    candidates: list[tuple[int, Rows, int]] = []
    for microbatch in microbatches:
        rows = microbatch.data_dict
        if key in rows:
            lengths = rows["input_lengths"].tolist()
            candidates += [(lengths[i], rows, i) for i, row in enumerate(rows[key].tensors) if row is not None]
    length, rows, index = min(candidates, key=lambda entry: entry[0])
    row: Rows = BatchedDataDict(_model_inputs(rows)).slice(index, index + 1)
    row.truncate_tensors(1, length)
    return row


def _model_inputs(rows: Rows) -> dict[str, Any]:
    return {
        "input_ids": rows["input_ids"],
        "input_lengths": rows["input_lengths"],
        **rows.get_multimodal_dict(),
    }


def _with_media(microbatch: Microbatch, keys: set[str], samples: dict[str, Rows | None]) -> Microbatch:
    """Append rows or sequences, without head positions, for the media in `keys` that `microbatch` lacks."""
    device = microbatch.processed_inputs.input_ids.device
    parts, has = [_model_inputs(microbatch.data_dict)], _media(microbatch.data_dict)
    if has - keys:  # a dummy: zero its tokens, so that none is an image placeholder
        lengths = {"input_lengths": parts[0]["input_lengths"]}
        tensors = {key: value for key, value in parts[0].items() if isinstance(value, torch.Tensor)}
        parts, has = [{key: torch.zeros_like(value) for key, value in tensors.items()} | lengths], set()
    for key in sorted(keys - has):
        sample = samples[key]
        assert sample is not None
        parts.append(sample.to(device).data)
    joined: Rows = BatchedDataDict.from_batches(parts, allow_missing_packed_tensors=True)
    real = real_tokens(joined)
    input_ids = joined["input_ids"].where(real, 0)
    if microbatch.cu_seqlens is not None:
        inputs, bounds = packed_inputs(input_ids, joined["input_lengths"])
        inputs.vlm_kwargs = packed_media(joined, real, inputs.seq_len)
        return replace(microbatch, processed_inputs=inputs, cu_seqlens=bounds.cpu())
    inputs = padded_inputs(input_ids)
    inputs.vlm_kwargs, inputs.position_ids = joined.get_multimodal_dict(as_tensors=True, device=device), None
    row = torch.div(microbatch.head_positions, microbatch.processed_inputs.seq_len, rounding_mode="floor")
    shift = inputs.seq_len - microbatch.processed_inputs.seq_len
    return replace(microbatch, processed_inputs=inputs, head_positions=microbatch.head_positions + row * shift)
