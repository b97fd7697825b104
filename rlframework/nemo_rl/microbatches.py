"""Microbatches from NeMo-RL's dictionaries: the functions of its `models/automodel/data.py`, under their names.

They read `cfg["dynamic_batching"]`, `cfg["sequence_packing"]` and `cfg["dtensor_cfg"]`. A batch is a `BatchedDataDict`
with `input_ids [B, S]` and `input_lengths [B]`, a shard of `shard_by_batch_size` if rows are packed or batched
dynamically. Rows become model inputs by the same functions as in `data_processor.MicrobatchProcessor`, which the
workers of this framework use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, cycle, islice, repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batch_rows import read_count, read_lengths
from rlframework.batch.collectives import max_over_ranks
from rlframework.interfaces.data_processor import ProcessedInputs, ProcessedMicrobatch
from rlframework.policy.microbatches.global_batch import check_tokens, process_global_batch
from rlframework.policy.microbatches.model_inputs import get_flash_attention_kwargs, packed_inputs, padded_inputs

if TYPE_CHECKING:
    from rlframework.batch.batched_data_dict import BatchedDataDict

__all__ = [
    "get_microbatch_iterator",
    "make_processed_microbatch_iterator",
    "process_global_batch",
    "process_microbatch",
]


def process_microbatch(
    mb: BatchedDataDict[Any], tokenizer: Any, enable_seq_packing: bool, cfg: Mapping[str, Any], cp_size: int
) -> ProcessedInputs:
    """Make the inputs of the model's forward from the rows of `mb`, on their device; tokens become int64.

    - Padded: `input_ids [B, S]` unchanged, an attention mask of ones (bool: right padding is invisible under causal
      attention, and a mask without holes allows the causal kernel), and positions `[B, S]`.
    - Packed (`enable_seq_packing`): one row `[1, L]` made by `pack_sequences`, no mask, positions that restart with
      each sequence, and the bounds of the sequences in `flash_attn_kwargs`.
    - Multimodal: `vlm_kwargs` are `mb.get_multimodal_dict`; `position_ids` is None, as the model computes its own.
    - With `cp_size > 1`: no mask, `seq_index [1, L]`, and as `cp_buffers` the tensors `input_ids`, `position_ids` and
      `seq_index` themselves, which torch's context parallelism shards in place. They share no memory with `mb`, and L
      is a multiple of `2 * cp_size`, which its load balancing needs.

    Differences from NeMo-RL: tensors stay on the device of `mb`, CUDA or not. A packed row is not padded to
    `cfg["sequence_packing"]["train_mb_tokens"]`, as nothing reads that padding. Padding for context parallelism is the
    tokenizer's end-of-sequence token.

    Raises `BatchError` for rows of a wrong shape, and for multimodal rows with packing, context or sequence
    parallelism.
    """
    input_ids = _check_rows(mb, enable_seq_packing, cfg, cp_size)
    multiple = 2 * cp_size if cp_size > 1 else 1
    pad_value = _padding_value(tokenizer)
    if enable_seq_packing:
        inputs, _ = packed_inputs(input_ids, mb["input_lengths"], multiple, pad_value)
        inputs.flash_attn_kwargs = get_flash_attention_kwargs(mb["input_lengths"])
    else:
        inputs = padded_inputs(input_ids, multiple, pad_value)
        if cp_size == 1:
            inputs.attention_mask = torch.ones_like(inputs.input_ids, dtype=torch.bool)
        if mb.get_multimodal_dict():
            inputs.vlm_kwargs = mb.get_multimodal_dict(as_tensors=True, device=input_ids.device)
            inputs.position_ids = None
    if cp_size > 1:  # sharded in place, so in memory that neither the batch nor another row shares
        assert inputs.position_ids is not None
        inputs.input_ids, inputs.position_ids = inputs.input_ids.clone(), inputs.position_ids.contiguous()
        inputs.seq_index = torch.arange(inputs.seq_len, device=input_ids.device)[None]
        inputs.cp_buffers = [inputs.input_ids, inputs.position_ids, inputs.seq_index]
    return inputs


def make_processed_microbatch_iterator(
    raw_iterator: Iterator[BatchedDataDict[Any]], tokenizer: Any, cfg: Mapping[str, Any], cp_size: int
) -> Iterator[ProcessedMicrobatch]:
    """Yield each microbatch of `raw_iterator` with its model inputs, which are made lazily.

    Rows are packed if `cfg["sequence_packing"]["enabled"]` is true; the section may be absent.
    """
    packing = _enabled(cfg, "sequence_packing")
    for rows in raw_iterator:
        yield ProcessedMicrobatch(
            rows, process_microbatch(rows, tokenizer, packing, cfg, cp_size), *rows["input_ids"].shape
        )


def get_microbatch_iterator(
    data: BatchedDataDict[Any], cfg: Mapping[str, Any], mbs: int, dp_mesh: Any, tokenizer: Any, cp_size: int = 1
) -> tuple[Iterator[ProcessedMicrobatch], int]:
    """Return the microbatches of one global batch and how many of them are real; the ones after those are dummies.

    With `cfg["dynamic_batching"]["enabled"]`, a required key, they are the microbatches that `shard_by_batch_size`
    planned, each as wide as its longest row; with `cfg["sequence_packing"]["enabled"]` its bins, each packed into one
    row; with neither, `mbs` rows each. Groups of rows stay together if they were planned with `group_ids_key`; `mbs`
    rows each keep them if the rows are ordered by groups of a size that divides `mbs`.

    Ranks may have different numbers of microbatches, or no rows at all, but all must run as many forward passes as the
    rank with the most. So the real microbatches are followed by dummies that repeat them in order, or that have one row
    of one token if the rank has none. The caller multiplies the loss of a dummy by 0 and discards its results.
    `dp_mesh` is the data-parallel ranks: a `DeviceMesh` of one dimension, a process group, or None for the default
    group (only this rank, if no default group exists).

    Differences from NeMo-RL, which takes the maximum over all ranks of the run and ignores `dp_mesh`, and makes dummies
    for packed microbatches only. Invalid keys, shapes and settings raise `BatchError` in this call, not at the first
    microbatch.
    """
    make, count = _raw_microbatches(data, cfg, mbs)
    _check_rows(data, _enabled(cfg, "sequence_packing"), cfg, cp_size)
    group = _group_of(dp_mesh)
    most = count if group is None else int(max_over_ranks(torch.tensor(count), group))
    dummies = cycle(make()) if count else repeat(_one_token(data))
    raw = chain(make(), islice(dummies, most - count))
    return make_processed_microbatch_iterator(raw, tokenizer, cfg, cp_size), count


def _raw_microbatches(
    data: BatchedDataDict[Any], cfg: Mapping[str, Any], mbs: int
) -> tuple[Callable[[], Iterator[BatchedDataDict[Any]]], int]:
    """Return a function that makes an iterator over the real microbatches of `data`, and their number."""
    dynamic, packing = _enabled(cfg, "dynamic_batching", required=True), _enabled(cfg, "sequence_packing")
    if dynamic and packing:
        raise BatchError("cfg enables both dynamic_batching and sequence_packing; enable only one of them")
    if not dynamic and not packing:
        mbs = read_count(mbs, "mbs", 1)
        if data.size % mbs:
            raise BatchError(
                f"{data.size} rows do not divide into microbatches of {mbs} rows; choose an mbs that divides them"
            )
        return lambda: data.make_microbatch_iterator(mbs), data.size // mbs
    if dynamic:
        return data.make_microbatch_iterator_with_dynamic_shapes, data.get_microbatch_iterator_dynamic_shapes_len()
    return (
        data.make_microbatch_iterator_for_packable_sequences,
        data.get_microbatch_iterator_for_packable_sequences_len()[0],
    )


def _one_token(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Make a row of one token 0 that contributes nothing, with the tensors and lists of `data` but without media."""
    width = data["input_ids"].shape[1]
    row: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Tensor):
            shape = value.shape[1:] if value.ndim < 2 or value.shape[1] != width else (1, *value.shape[2:])
            row[key] = value.new_zeros((1, *shape))
        elif isinstance(value, list):
            row[key] = [None]
    if "input_lengths" in row:
        row["input_lengths"] += 1
    return type(data)(row)


def _group_of(dp_mesh: Any) -> dist.ProcessGroup | None:
    """Return the process group of `dp_mesh`; None if this rank is alone."""
    if dp_mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(dp_mesh, DeviceMesh):
        if dp_mesh.ndim != 1:
            raise BatchError(
                f"dp_mesh has the dimensions {dp_mesh.mesh_dim_names or dp_mesh.ndim}; pass the data-parallel one "
                'only, as in mesh["dp"]'
            )
        return dp_mesh.get_group()
    if not isinstance(dp_mesh, dist.ProcessGroup):
        raise BatchTypeError(f"dp_mesh is a {type(dp_mesh).__name__}; pass a DeviceMesh, a process group or None")
    return dp_mesh


def _check_rows(data: BatchedDataDict[Any], packing: bool, cfg: Mapping[str, Any], cp_size: int) -> Tensor:
    """Return `input_ids`; raise `BatchError` if these rows cannot be processed with these settings."""
    input_ids = check_tokens(data)
    if packing:
        if "input_lengths" not in data:
            raise BatchKeyError(f"input_lengths must be present to pack rows; the data has {sorted(data, key=str)}")
        read_lengths(data["input_lengths"], input_ids.shape[1])
    read_count(cp_size, "cp_size", 1)
    requested = {
        "sequence packing": packing,
        "context parallelism": cp_size > 1,
        "sequence parallelism": _section(cfg, "dtensor_cfg").get("sequence_parallel", False),
    }
    unsupported = [feature for feature, enabled in requested.items() if enabled]
    media = sorted(data.get_multimodal_dict())
    if media and unsupported:
        raise BatchError(
            f"multimodal rows ({', '.join(media)}) are not supported with {' and '.join(unsupported)}; disable it"
        )
    return input_ids


def _section(cfg: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return `cfg[name]`, or an empty section if it is absent or None."""
    if not isinstance(cfg, Mapping):
        raise BatchTypeError(f"cfg must be a dictionary with sections such as {name}, got a {type(cfg).__name__}")
    found = cfg.get(name) or {}
    if not isinstance(found, Mapping):
        raise BatchError(f"cfg[{name!r}] must be a section (a dictionary), got {found!r}")
    return found


def _enabled(cfg: Mapping[str, Any], name: str, *, required: bool = False) -> bool:
    """Whether `cfg[name]["enabled"]` is true; if absent, false, or an error if it is `required`."""
    found = _section(cfg, name)
    if required and "enabled" not in found:
        raise BatchKeyError(f"cfg must have a section {name} with the key enabled, got {cfg.get(name)!r}")
    return bool(found.get("enabled", False))


def _padding_value(tokenizer: Any) -> int:
    """Return the padding token: its value does not matter, but the model must have an embedding for it."""
    tokens = (getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
    return int(next((token for token in tokens if token is not None), 0))
