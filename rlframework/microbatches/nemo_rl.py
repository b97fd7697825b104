"""Microbatches from NeMo-RL's dictionaries: the functions of its `models/automodel/data.py`, by their names.

They read `cfg["dynamic_batching"]`, `cfg["sequence_packing"]` and `cfg["dtensor_cfg"]`; a batch is a `BatchedDataDict`
with `input_ids [B, S]` and `input_lengths [B]`, sharded by `shard_by_batch_size` where rows are packed or batched
dynamically. Our own workers take `microbatches.MicrobatchProcessor` instead, which shares `process_global_batch`.
Left out: what the model does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, cycle, islice, repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from rlframework.batch.collectives import max_over_ranks
from rlframework.batch.packing.lengths import read_count, round_up
from rlframework.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.interfaces.data_processor import ProcessedInputs, ProcessedMicrobatch
from rlframework.microbatches.global_batch import check_tokens, process_global_batch
from rlframework.microbatches.model_inputs import get_flash_attention_kwargs, pack_sequences

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
    """What the model's forward takes of the rows of `mb`, on their device; tokens of any integers become int64.

    - Padded: `input_ids [B, S]` as they are, an attention mask of ones (bool: padding on the right is invisible under
      causal attention, and a mask without holes lets attention take its causal kernel), positions `[B, S]`.
    - Packed (`enable_seq_packing`): one row `[1, L]` by `pack_sequences`, no mask, positions that start again with each
      sequence, and its bounds in `flash_attn_kwargs`.
    - Multimodal: what `mb.get_multimodal_dict` has, in `vlm_kwargs`; `position_ids` None, as the model makes its own.
    - With `cp_size > 1`: no mask, `seq_index [1, L]`, and `cp_buffers`: `input_ids`, `position_ids` and `seq_index`
      themselves, which torch's context parallelism splits in place. They share no memory with `mb`, and L is a
      multiple of `2 * cp_size`, which it needs to balance the ranks.

    Not as in NeMo-RL: tensors stay on the device of `mb`, CUDA or not; a packed row is not filled up to
    `cfg["sequence_packing"]["train_mb_tokens"]`, because nobody reads that padding. What is added for context
    parallelism is the tokenizer's end-of-sequence token.

    `BatchError` for rows of a wrong shape, and for multimodal rows with packing, context or sequence parallelism.
    """
    input_ids = _check_rows(mb, enable_seq_packing, cfg, cp_size).to(torch.int64)
    multiple = 2 * cp_size if cp_size > 1 else 1
    filling = _padding_value(tokenizer)
    if enable_seq_packing:
        inputs = _packed(input_ids, mb["input_lengths"], filling, multiple)
    else:
        inputs = _padded(input_ids, filling, multiple, with_mask=cp_size == 1)
        if mb.get_multimodal_dict():
            inputs.vlm_kwargs = mb.get_multimodal_dict(as_tensors=True, device=input_ids.device)
            inputs.position_ids = None
    if cp_size > 1:
        _add_context_parallel_buffers(inputs, mb)
    return inputs


def make_processed_microbatch_iterator(
    raw_iterator: Iterator[BatchedDataDict[Any]], tokenizer: Any, cfg: Mapping[str, Any], cp_size: int
) -> Iterator[ProcessedMicrobatch]:
    """Each microbatch of `raw_iterator` and what the model gets of it, made when it is asked for.

    Rows are packed where `cfg["sequence_packing"]["enabled"]` is true; the section may be absent.
    """
    packing = _enabled(cfg, "sequence_packing")
    for rows in raw_iterator:
        inputs = process_microbatch(rows, tokenizer, packing, cfg, cp_size)
        count, width = rows["input_ids"].shape
        yield ProcessedMicrobatch(rows, inputs, original_batch_size=count, original_seq_len=width)


def get_microbatch_iterator(
    data: BatchedDataDict[Any], cfg: Mapping[str, Any], mbs: int, dp_mesh: Any, tokenizer: Any, cp_size: int = 1
) -> tuple[Iterator[ProcessedMicrobatch], int]:
    """The microbatches of one global batch, and how many of them are real; what comes after those is dummies.

    `cfg["dynamic_batching"]["enabled"]` (must be there): the microbatches that `shard_by_batch_size` planned, each as
    wide as its longest row; or `cfg["sequence_packing"]["enabled"]`: its bins, each packed into one row; with neither,
    `mbs` rows each.

    Ranks may have different numbers of microbatches, or no rows at all. All of them run as many forwards as the rank
    with most: dummies follow the real microbatches, which repeat those in order (or hold one row of one token, where
    there are none). The caller multiplies the loss of a dummy by 0 and drops what it returns. `dp_mesh`: the
    data-parallel ranks, as a `DeviceMesh` of one dimension or a process group; None: the default group, or this rank
    alone where there is none.

    Not as in NeMo-RL: it asks all ranks of the run for their number and ignores `dp_mesh`; it makes dummies for packed
    microbatches only. Wrong keys, shapes and settings are a `BatchError` here, not at the first microbatch.
    """
    make, count = _raw_microbatches(data, cfg, mbs)
    _check_rows(data, _enabled(cfg, "sequence_packing"), cfg, cp_size)
    group = _group_of(dp_mesh)
    most = count if group is None else int(max_over_ranks(torch.tensor(count), group))
    again = cycle(make()) if count else repeat(_one_token(data))
    raw = chain(make(), islice(again, most - count))
    return make_processed_microbatch_iterator(raw, tokenizer, cfg, cp_size), count


def _raw_microbatches(
    data: BatchedDataDict[Any], cfg: Mapping[str, Any], mbs: int
) -> tuple[Callable[[], Iterator[BatchedDataDict[Any]]], int]:
    """What makes an iterator over the real microbatches of `data`, and how many there are."""
    dynamic, packing = _enabled(cfg, "dynamic_batching", required=True), _enabled(cfg, "sequence_packing")
    if dynamic and packing:
        raise BatchError("cfg switches on both dynamic_batching and sequence_packing; rows go one way: choose one")
    if not dynamic and not packing:
        mbs = read_count(mbs, "mbs", 1)
        if data.size % mbs:
            raise BatchError(f"{data.size} rows do not divide into microbatches of {mbs}")
        return lambda: data.make_microbatch_iterator(mbs), data.size // mbs
    if dynamic:
        return data.make_microbatch_iterator_with_dynamic_shapes, data.get_microbatch_iterator_dynamic_shapes_len()
    return (
        data.make_microbatch_iterator_for_packable_sequences,
        data.get_microbatch_iterator_for_packable_sequences_len()[0],
    )


def _one_token(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """A row of one token 0 that counts for nothing, with the tensors and lists of `data`; media are left out."""
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
    """The process group of `dp_mesh`; None where this rank is alone."""
    if dp_mesh is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(dp_mesh, DeviceMesh):
        if dp_mesh.ndim != 1:
            raise BatchError(
                f"dp_mesh has the dimensions {dp_mesh.mesh_dim_names or dp_mesh.ndim}; give the data-parallel one "
                'alone, as in mesh["dp"]'
            )
        return dp_mesh.get_group()
    if not isinstance(dp_mesh, dist.ProcessGroup):
        raise BatchTypeError(f"dp_mesh is a {type(dp_mesh).__name__}; give a DeviceMesh, a process group or None")
    return dp_mesh


def _packed(input_ids: Tensor, lengths: Tensor, filling: int, multiple: int) -> ProcessedInputs:
    known = lengths.cpu()
    tokens = round_up(int(known.sum()), multiple)
    packed, positions, _ = pack_sequences(
        input_ids, known, [len(input_ids)], filling, return_attention_mask=False, min_seq_len=tokens
    )
    return ProcessedInputs(
        packed, tokens, position_ids=positions, flash_attn_kwargs=get_flash_attention_kwargs(lengths)
    )


def _padded(input_ids: Tensor, filling: int, multiple: int, *, with_mask: bool) -> ProcessedInputs:
    rows, width = input_ids.shape
    length = round_up(width, multiple)
    return ProcessedInputs(
        input_ids=pad(input_ids, (0, length - width), value=filling) if length > width else input_ids,
        seq_len=length,
        attention_mask=torch.ones(rows, length, dtype=torch.bool, device=input_ids.device) if with_mask else None,
        position_ids=torch.arange(length, device=input_ids.device).repeat(rows, 1),
    )


def _add_context_parallel_buffers(inputs: ProcessedInputs, mb: BatchedDataDict[Any]) -> None:
    if inputs.input_ids is mb["input_ids"]:
        inputs.input_ids = inputs.input_ids.clone()  # what is split in place must not be the batch
    assert inputs.position_ids is not None
    inputs.seq_index = torch.arange(inputs.seq_len, device=inputs.input_ids.device)[None]
    inputs.cp_buffers = [inputs.input_ids, inputs.position_ids, inputs.seq_index]


def _check_rows(data: BatchedDataDict[Any], packing: bool, cfg: Mapping[str, Any], cp_size: int) -> Tensor:
    """`input_ids`; a `BatchError` where these rows cannot be processed in this way."""
    input_ids = check_tokens(data)
    if packing and "input_lengths" not in data:
        raise BatchKeyError(f"input_lengths must be present in rows that are packed; they have {sorted(data, key=str)}")
    read_count(cp_size, "cp_size", 1)
    media = sorted(data.get_multimodal_dict())
    sequence_parallel = bool(_section(cfg, "dtensor_cfg").get("sequence_parallel", False))
    asked = {"sequence packing": packing, "context parallelism": cp_size > 1, "sequence parallelism": sequence_parallel}
    refused = [feature for feature, on in asked.items() if on and media]
    if refused:
        raise BatchError(
            f"multimodal rows ({', '.join(media)}) are not supported for {' and '.join(refused)}: switch that off"
        )
    return input_ids


def _section(cfg: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`cfg[name]`; empty where it is absent or None."""
    if not isinstance(cfg, Mapping):
        raise BatchTypeError(f"cfg must be a dictionary with sections such as {name}, got a {type(cfg).__name__}")
    found = cfg.get(name) or {}
    if not isinstance(found, Mapping):
        raise BatchError(f"cfg[{name!r}] must be a section with keys of its own, got {found!r}")
    return found


def _enabled(cfg: Mapping[str, Any], name: str, *, required: bool = False) -> bool:
    """Whether `cfg[name]["enabled"]` is true; absent is false, unless it is `required`."""
    found = _section(cfg, name)
    if required and "enabled" not in found:
        raise BatchKeyError(f"cfg must have a section {name} with the key enabled, got {cfg.get(name)!r}")
    return bool(found.get("enabled", False))


def _padding_value(tokenizer: Any) -> int:
    """The token that fills rows up where they must be: nobody reads it, but the model must know it."""
    tokens = (getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
    return int(next((token for token in tokens if token is not None), 0))
